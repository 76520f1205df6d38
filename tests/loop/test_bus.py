"""Agents and two workers on a real nats-server: what is found over HTTP is found there."""

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fleet.bus.server import Fabric, NatsServer
from tests.loop.cluster import TOKEN, LoopCluster, loop_cluster
from tests.loop.node import poll
from tests.loop.over_nodes import capture_of, captured_straggler, only_anomaly, trained
from tests.loop.trainings import ON_A_BUSY_MACHINE
from tests.waiting import DEADLINE_S
from warpwatch_daemon.demo.processes import free_port

pytestmark = [pytest.mark.bus, pytest.mark.torch]

AWAY_S = 60.0


@pytest.fixture
def server(tmp_path: Path) -> Iterator[NatsServer]:
    folder = tmp_path / "nats"
    folder.mkdir()
    server = NatsServer(folder)
    asyncio.run(Fabric(server).create())
    yield server
    server.kill()


@pytest.fixture
def cluster(tmp_path: Path, server: NatsServer) -> Iterator[LoopCluster]:
    about = {"detection": ON_A_BUSY_MACHINE, "bus": {"url": server.url}}
    with loop_cluster(tmp_path, 3, **about) as cluster:
        cluster.start()
        yield cluster


@pytest.fixture
def second(cluster: LoopCluster) -> int:
    """The port of another worker."""
    port = free_port()
    cluster.start_worker(2, port)
    return port


def test_two_workers_find_and_capture_a_straggler_and_a_hang(cluster, second):
    captured_straggler(cluster)
    processes = {one["rank"]: one for node in cluster.nodes for one in node.get("ranks")}
    os.kill(processes[3]["pid"], signal.SIGSTOP)
    hang = only_anomaly(cluster, "hang")
    assert (hang["rank"], hang["node"]) == (3, "gpu-2")
    capture = capture_of(cluster, hang)
    assert capture["request"]["kind"] == "stacks"
    states = {one["rank"]: one for one in capture["ranks"]}
    assert [states[rank]["state"] for rank in (0, 1, 2, 4, 5)] == ["written"] * 5, capture
    said = capture["diagnosis"]["summary"]
    assert "rank 3 on gpu-2" in said and "stopped" in said, capture
    os.kill(processes[3]["pid"], signal.SIGCONT)
    # Everything was over the bus.
    poll(lambda: cluster.http.get("/readyz").json()["ready"], cluster.log)


def test_a_session_is_valid_on_all_workers_until_it_ends_on_one(cluster, second):
    pages = [f"http://127.0.0.1:{port}" for port in (cluster.port, second)]
    poll(lambda: httpx.get(f"{pages[1]}/readyz", timeout=DEADLINE_S).is_success, cluster.log)

    def request(page: str, method: str, path: str, **more: Any) -> httpx.Response:
        more |= {"headers": {"Origin": page}, "timeout": DEADLINE_S}
        return httpx.request(method, page + path, **more)

    def valid(cookies: httpx.Cookies) -> list[bool]:
        return [request(one, "GET", "/api/v1/jobs", cookies=cookies).is_success for one in pages]

    keys = [request(pages[0], "POST", "/login", data={"token": TOKEN}).cookies for _ in range(2)]
    assert [valid(key) for key in (*keys, httpx.Cookies())] == [[True] * 2, [True] * 2, [False] * 2]
    request(pages[1], "POST", "/logout", cookies=keys[0])
    assert [valid(key) for key in keys] == [[False] * 2, [True] * 2]


def test_a_minute_without_the_server_costs_no_step_and_repeats_no_anomaly(cluster, second, server):
    faults, agent = trained(cluster, "away"), cluster.nodes[0]
    (faults / "fault").write_text("slower_forward 4")
    straggler = only_anomaly(cluster, "straggler")
    assert capture_of(cluster, straggler)["outcome"] == "complete"

    def of_rank(metric: str) -> float:
        return agent.metric(f"warpwatch_{metric}", rank="0") or 0.0

    def found() -> list[Any]:
        return [one for one in cluster.get("anomalies") if one["kind"] in ("straggler", "hang")]

    spent, last = "step_duration_seconds_sum", "rank_last_step_timestamp_seconds"
    begun_s, killed = of_rank(spent), of_rank(last)
    server.kill()
    (faults / "fault").write_text("")
    poll(lambda: not cluster.http.get("/readyz").json()["ready"], cluster.log)
    poll(
        lambda: of_rank(spent) > begun_s + AWAY_S, "the training goes on, and scrapes are answered"
    )
    assert (agent.metric("warpwatch_bus_messages_total", result="failed") or 0) > 0
    started = of_rank(last)
    server.start()
    poll(lambda: cluster.http.get("/readyz").json()["ready"], cluster.log)
    poll(lambda: [one for one in found() if one["end_time"] is not None], cluster.log)
    ((ident, end_time),) = [(one["id"], one["end_time"]) for one in found()]
    assert ident == straggler["id"]
    # It ended by what the agents kept meanwhile.
    assert killed < end_time < started
    lost = [node.metric("warpwatch_bus_lines_lost_total") for node in cluster.nodes]
    assert lost == [0.0] * 3
    (faults / "fault").write_text("slower_forward 1")
    again = poll(lambda: [one for one in found() if one["id"] != ident], cluster.log)
    assert [(one["kind"], one["rank"], one["node"]) for one in again] == [("straggler", 1, "gpu-1")]
