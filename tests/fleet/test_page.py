"""What the fleet's page says of a job over nodes, and that it fits."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

import httpx
import pytest

from tests.daemon.http.conftest import http_client
from tests.fleet.nodes import NOW, TestCluster, TestNode, run
from tests.fleet.shown import MemoryFleet, fleet, fleet_state, node, url, with_nodes
from warpwatch_fleet.page import nodes
from warpwatch_fleet.page.heatmap import MAX_CELLS, heat_map, listed
from warpwatch_telemetry.metric import SeriesKey
from warpwatch_telemetry.records import DeviceReading
from warpwatch_telemetry.samples import SourceHealth

__all__ = ["fleet", "url"]


@pytest.fixture
def http(url: str) -> Iterator[httpx.Client]:
    with http_client(url) as client:
        yield client


def cells(page: str) -> list[str]:
    return re.findall(r'<i class="([^"]*)" title="rank', page)


def test_the_slow_rank_is_the_cell_that_differs(http: httpx.Client) -> None:
    page = http.get("/").text
    assert "Rank 4 on gpu-003 is the slowest: 410 ms itself, 1.6 times the median" in page
    alike = "own-0 wait-4"
    assert cells(page) == [alike] * 4 + ["own-4 wait-2 marked", alike]
    assert page.count('class="heat-node slow"') == 1


def test_thousands_of_ranks_are_cells_without_words(http: httpx.Client, fleet: MemoryFleet) -> None:
    fleet.now = fleet_state(2048, 8, 1234)
    page = http.get("/").text
    assert (len(cells(page)), page.count('class="heat-node')) == (2048, 256)
    assert [at for at, cell in enumerate(cells(page)) if "marked" in cell] == [1234]
    assert len(page) < 300_000
    ((_, ranks, shown),) = listed(fleet_state(MAX_CELLS + 8, 8, None))
    assert (len(ranks), shown) == (MAX_CELLS + 8, None)


def test_ranks_that_are_alike_or_gone_are_said_in_words() -> None:
    ranks = list(fleet_state(6, 2, None).ranks)
    alike = heat_map(ranks, set())
    assert not alike.is_slow and alike.sentence.startswith("All alike: 251 ms")
    # Without a phase `comm` the whole step is a rank's own.
    unknown = heat_map([replace(one, comm_s=None) for one in ranks], set())
    assert not unknown.waits and unknown.nodes["gpu-001"][0].own_s == "480 ms"
    ranks[3] = replace(ranks[3], status="stopped")
    assert heat_map(ranks, set()).sentence == "Rank 3 on gpu-002 does not move"


def test_nodes_in_trouble_come_first(fleet: MemoryFleet) -> None:
    shown = (node(1), node(2, late_s=9.0), node(3, up=False), node(4, hot=True), node(5))
    anomaly = replace(fleet.now.anomalies[0], node="gpu-005")
    found = nodes.listed(with_nodes(replace(fleet.now, anomalies=(anomaly,)), *shown))
    order = [health.name for health, _ in found]
    assert order == ["gpu-003", "gpu-002", "gpu-005", "gpu-004", "gpu-001"]
    assert [one.tone for one in found[3][1]][4:6] == ["busy", "hot"]
    away = SourceHealth("gpu-003", False, "no route", 0.0)
    assert nodes.how(away) == "away: no route"


def test_a_run_has_a_page_that_compares_it_with_the_one_before(http, fleet):
    before = {"run": "40", "first_time": NOW - 9000, "end_time": NOW - 5000}
    fleet.runs = [
        run(0, 1, step_p50_s=0.42, phases_s={"forward": 0.2, "<i>": 0.1}, **before),
        run(0, 1, step_p50_s=0.48, phases_s={"forward": 0.26}, step_counts={420: 9}, anomalies={}),
    ]
    (link,) = re.findall(r'href="(/run[^"]*run=41)"', http.get("/").text)
    page = http.get(link.replace("&amp;", "&"))
    assert "+14.3 % since the run before, most of it in forward" in page.text
    assert "200 ms → 260 ms" in page.text
    assert "<i>" not in page.text and "&lt;i&gt;" in page.text
    assert "script-src 'sha256-" in page.headers["content-security-policy"]
    assert http.get("/run?job=llama&run=none").status_code == 404


def test_of_a_device_what_the_page_shows_is_kept() -> None:
    agent = TestNode("gpu-1")
    cluster = TestCluster(agent)
    cluster.hear()
    many: dict[SeriesKey, float] = {
        ("device_fan_ratio", (str(number),)): 1.0 for number in range(500)
    }
    agent.say(*(DeviceReading(NOW, one.device.uuid, {**one.values, **many}) for one in node(1)[1]))
    cluster.hear()
    kept = cluster.cluster.nodes[agent.address].samples
    assert list(kept) == [f"GPU-001-{index}" for index in range(8)]
    assert {gpu.tone for gpu in nodes.gpus(tuple(kept.values()), NOW)} == {"busy"}
    assert all(0 < len(sample.values) < 10 for sample in kept.values())
