"""The fleet's page of a job over nodes, and its size."""

import asyncio
import re
from collections.abc import Iterator
from dataclasses import replace

import httpx
import pytest
from textual.widgets import DataTable

from tests.cases import cases
from tests.daemon.http.conftest import local_client, socket_of
from tests.fleet.nodes import NOW, run
from tests.fleet.shown import crowded_state, fleet, fleet_state, node, server, with_nodes
from warpwatch_daemon.api_client import ApiClient
from warpwatch_daemon.cli import status, top_screen
from warpwatch_daemon.cli.top_screen import Top, TopClient
from warpwatch_fleet.page import heatmap, nodes
from warpwatch_serving.bodies import PageFilters
from warpwatch_serving.page.findings import headline
from warpwatch_serving.page.jobs import ranked
from warpwatch_serving.page.selection import Selection
from warpwatch_serving.server import Server
from warpwatch_telemetry.samples import Device, DeviceSample, SourceHealth
from warpwatch_telemetry.state import State

__all__ = ["fleet", "server"]


@pytest.fixture
def http(server: Server) -> Iterator[httpx.Client]:
    with local_client(server) as client:
        yield client


def cells(page: str) -> list[str]:
    return re.findall(r'<i class="([^"]*)" title="rank', page)


def test_the_pages_of_a_job_its_nodes_and_its_run_are_golden(http, fleet, golden):
    """Nodes in trouble come first, GPUs that need service the oldest first; one is served."""
    shown = (node(1), node(2, late_s=9.0), node(3, up=False), node(4, hot=True), node(5))
    slow = replace(fleet.now.anomalies[0], node="gpu-005")
    one = replace(slow, kind="device_needs_service", job=None, rank=None, gpu=2)
    service = [
        replace(one, id=f"s{n}", node=f"gpu-00{n}", time=NOW - 100 * n, end_time=end)
        for n, end in ((1, None), (2, None), (3, NOW))
    ]
    fleet.now = with_nodes(replace(fleet.now, anomalies=(slow, *service)), *shown)
    before = {"run": "40", "first_time": NOW - 9000, "end_time": NOW - 5000}
    fleet.runs = [
        run(0, 1, step_p50_s=0.42, phases_s={"forward": 0.2, "<i>": 0.1}, **before),
        run(0, 1, step_p50_s=0.48, phases_s={"forward": 0.26}, step_counts={420: 9}, anomalies={}),
    ]
    page = http.get("/").text
    (link,) = re.findall(r'href="(/run[^"]*run=41)"', page)
    compared = http.get(link.replace("&amp;", "&"))
    assert "script-src 'sha256-" in compared.headers["content-security-policy"]
    assert http.get("/run?job=llama&run=none").status_code == 404
    for name, text in (("page", page), ("run", compared.text)):
        golden(f"fleet/{name}.html", text.encode())


def test_thousands_of_ranks_are_cells_without_words(http, fleet):
    fleet.now = fleet_state(2048, 8, 1234)
    page = http.get("/").text
    assert (len(cells(page)), page.count('class="heat-node')) == (2048, 256)
    assert [at for at, cell in enumerate(cells(page)) if "marked" in cell] == [1234]
    assert len(page) < 300_000
    many = ((4096, 1), (4104, 1), (2052, 2))
    drawn = [heatmap.maps(ranked(fleet_state(ranks, 8, None)) * jobs) for ranks, jobs in many]
    assert [len(one) for one in drawn] == [1, 0, 1]
    # The jobs with a slow rank, also without an anomaly; a single one with words.
    slow = ranked(replace(fleet_state(6, 2, 4), anomalies=()))
    found = [[one.large for _, one in heatmap.maps(slow * count)] for count in (1, 2, 4)]
    assert found == [[True], [False] * 2, [False] * 3]


def test_the_tones_and_words_of_nodes_gpus_and_ranks_are_golden(golden_case):
    some, agents = fleet_state(6, 2, 4), []
    for name, about in cases(__file__)["nodes"].items():
        gpus = []
        for number, gpu in enumerate(about.pop("gpus", ())):
            keys = {(one.split()[0], (*one.split()[1:],)): one for one in gpu.get("values", ())}
            values = {k: gpu["values"][one] + NOW * ("_time" in one) for k, one in keys.items()}
            device = Device(f"GPU-{number}", number, "")
            gpus.append(DeviceSample(device, NOW, **gpu | {"values": values, "source": name}))
        agents.append((SourceHealth(name, **about), gpus))
    anomalies = replace(some.anomalies[0], node="gpu-001"), replace(some.anomalies[0], end_time=NOW)
    state = with_nodes(replace(some, anomalies=anomalies), *agents)
    lines = [f"{nodes.shown(listed := nodes.listed(state), nodes.troubled(state))} are shown\n"]
    for health, drawn_gpus in listed:
        lines.append(f"{health.name}: {nodes.tone(health)}: {nodes.how(health)}\n")
        lines += [f"  {gpu.tone}: {gpu.title}\n" for gpu in drawn_gpus]
    for hosts in cases(__file__)["cells"]:
        about = enumerate(hosts.items())
        ranks = tuple(replace(some.ranks[0], rank=at, host=h, **one) for at, (h, one) in about)
        drawn = heatmap.heat_map(ranks, set(), large=True)
        running = nodes.ranks(replace(state, ranks=ranks))
        lines.append(f"waits: {drawn.waits}, slow: {sorted(heatmap.slow_nodes(drawn))}\n")
        for host, (cell,) in drawn.nodes.items():
            lines.append(f"  {host}: {running[host]} running: {cell.classes}: {cell.title}\n")
    golden_case("".join(lines))


def test_ranks_that_are_alike_or_gone_are_said_in_words():
    alike = fleet_state(6, 2, None)
    (job,) = ranked(alike)
    assert not job.is_slow and job.sentence.startswith("All alike: 251 ms")
    ranks = (*alike.ranks[:3], replace(alike.ranks[3], status="stopped"), *alike.ranks[4:])
    (job,) = ranked(replace(alike, ranks=ranks))
    assert job.sentence == "Rank 3 on gpu-002 does not move"


def test_of_many_jobs_the_worst_come_first_and_the_page_stays_short(http, fleet):
    fleet.now = crowded_state()
    order = [one.job.name for one in ranked(fleet.now)]
    stalled = sorted(f"llama-{number}" for number in range(40, 70))
    assert order[:32] == ["llama-0", "llama-4", *stalled]
    assert order[32:35] == ["llama-1", "llama-2", "llama-3"]
    page = http.get("/").text
    assert page.count('<article class="card job">') == 2
    assert page.count('<li class="row') == 17 + 20
    assert page.index("XID 79") < page.index("Rank 128 computes") < page.index("Data stall")
    more = re.findall(r"And (\d+) more ([a-z ]+): <a href=\"/\?all=true#", page)
    assert more == [("13", "active anomalies"), ("167", "jobs"), ("230", "nodes")]
    whole = http.get("/?all=true").text
    assert (whole.count('<li class="row'), re.findall(r"And \d+ more", whole)) == (30 + 187, [])


@pytest.mark.parametrize(("query", "counts", "anomalies"), cases(__file__)["searches"])
def test_the_page_is_searched_by_job_owner_and_node(http, fleet, query, counts, anomalies):
    fleet.now = crowded_state()
    found = Selection(fleet.now, PageFilters(**query))
    # Another owner may be chosen next.
    assert found.owners() == Selection(fleet.now, PageFilters()).owners()
    shown = (found.state.jobs, found.state.ranks, found.state.sources)
    assert [len(one) for one in shown] == counts
    assert {one.id for one in found.state.anomalies} == set(anomalies)
    own = (replace(fleet.now.anomalies[0], job=None, node=""),)
    assert Selection(replace(fleet.now, anomalies=own), PageFilters(**query)).state.anomalies == own
    page = http.get("/", params=query | {"all": "true"}).text
    assert len(re.findall('<li class="(?:up|late|down)">', page)) == counts[2]
    assert ("Nothing matches the search" in page) == (counts[0] == 0)


def test_status_begins_with_what_is_wrong_and_lists_the_ranks_of_one_job(
    server, fleet, capsys, monkeypatch
):
    fleet.now = crowded_state()
    folder = str(socket_of(server).parent).removesuffix("-api")
    monkeypatch.setenv("WARPWATCH_DIR", folder)

    def lines(*options: str) -> list[str]:
        assert status.main([*options], lambda: NOW) == 1
        out: str = capsys.readouterr().out
        return out.splitlines()

    said = lines()
    assert said[0] == "! 3 of 250 agents cannot be reached"
    assert [line.split()[1] for line in said[2:5]] == ["xid,", "straggler,", "straggler,"]
    assert said[22:24] == [
        "  and 13 more anomalies: --json",
        "2000 of 2000 devices up, 2000 ranks of 189 jobs",
    ]
    assert said[24].startswith("  llama-0: ns/nlp, 256 ranks, ")
    assert said[44:] == ["  and 169 more jobs: --job, --owner or --ranks"]
    assert len([line for line in lines("--job", "llama-4") if line.startswith("    rank ")]) == 32
    assert "564 ranks of 63 jobs" in "\n".join(lines("--owner", "uid/1004"))


def test_top_begins_with_ranks_and_gpus_in_trouble_and_is_searched(server, fleet):
    fleet.now = crowded_state()
    api = ApiClient(socket_path=socket_of(server))
    reading = TopClient(lambda: api).read()
    assert top_screen.headline(reading.state).startswith(
        "3 of 250 agents cannot be reached, 2000 GPUs, "
    )
    troubled = [key[:2] for key, _ in top_screen.rank_rows(reading, wide=True)][:3]
    assert troubled == [("llama-0", "128"), ("llama-4", "16"), ("llama-0", "0")]
    assert [key for key, _ in top_screen.device_rows(reading.state, wide=True)][:2] == [
        "GPU-077-5",
        "GPU-155-2",
    ]
    assert "! xid, " in top_screen.finding_lines(reading.state, 4)[0].plain
    found = reading.narrowed("GPU-155").state
    assert [len(part) for part in (found.ranks, found.devices, found.anomalies)] == [12, 8, 3]
    asyncio.run(fits_80_columns(Top(TopClient(lambda: api), interval_s=3600.0)))


async def fits_80_columns(app: Top) -> None:
    async with app.run_test(size=(80, 24)) as pilot:
        while not app.query_one("#ranks", DataTable).row_count:
            await pilot.pause(0.05)
        await pilot.pause()
        assert app.screen.virtual_size == (80, 24)


def test_the_headline_says_what_the_fleet_does_not_see(golden):
    well, slow = fleet_state(6, 2, None), fleet_state(6, 2, 4)
    new = replace(node(1)[0], up=False, reason="not asked yet")
    lost = (node(n, up=False) for n in range(1, 6))
    away = [
        (agent, [replace(one, up=False, reason="stale") for one in gpus]) for agent, gpus in lost
    ]
    behind = [node(n, late_s=200.0) for n in range(6, 9)]
    in_time = [node(n) for n in range(9, 20)]
    states = {
        "all in time": well,
        "some behind": with_nodes(well, *behind, *in_time),
        "one away, a straggler": with_nodes(slow, away[0], *in_time),
        "most away or behind, a straggler": with_nodes(slow, *away, *behind, node(9)),
        "all away, no job": replace(with_nodes(well, *away, *behind), ranks=(), jobs=()),
        "not asked yet": State(NOW, "0.2.0", "fleet-0", sources=(new,)),
    }
    found = {name: headline(state) for name, state in states.items()}
    lines = [f"{name}: {one.level}: {one.sentence} {one.notes}" for name, one in found.items()]
    golden("http/fleet_headlines.txt", "\n".join(lines).encode())
