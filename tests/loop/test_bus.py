"""Agents and two workers on a real nats-server: what is found over HTTP is found there."""

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fleet.bus.server import Fabric, NatsServer
from tests.loop.cluster import LoopCluster, loop_cluster
from tests.loop.node import poll
from tests.loop.over_nodes import NODES, capture_of, only_anomaly, trained
from tests.loop.trainings import ON_A_BUSY_MACHINE

pytestmark = [pytest.mark.bus, pytest.mark.torch]


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
        cluster.start_worker(2)
        yield cluster


def test_two_workers_find_and_capture_a_straggler_and_a_hang(cluster):
    faults = trained(cluster, "slow")
    (faults / "fault").write_text("slower_forward 4")
    straggler = only_anomaly(cluster, "straggler")
    assert (straggler["rank"], straggler["node"]) == (4, "gpu-3")
    capture = capture_of(cluster, straggler)
    assert (capture["outcome"], capture["detail"]) == ("complete", ""), cluster.log()
    ranks = [(one["rank"], one["state"], one["node"]) for one in capture["ranks"]]
    assert ranks == [(rank, "written", NODES[rank]) for rank in range(6)]
    (late,) = [one for one in capture["diagnosis"]["findings"] if one["kind"] == "straggler"]
    assert (late["rank"], late["node"]) == (4, "gpu-3")
    report = cluster.http.get(f"/api/v1/captures/{capture['id']}/report.html")
    assert "rank 4 on gpu-3" in report.text

    processes = {one["rank"]: one for node in cluster.nodes for one in node.get("ranks")}
    os.kill(processes[3]["pid"], signal.SIGSTOP)
    hang = only_anomaly(cluster, "hang")
    assert (hang["rank"], hang["node"]) == (3, "gpu-2")
    capture = capture_of(cluster, hang)
    states = {one["rank"]: one for one in capture["ranks"]}
    assert [states[rank]["state"] for rank in (0, 1, 2, 4, 5)] == ["written"] * 5, capture
    os.kill(processes[3]["pid"], signal.SIGCONT)
    # Everything was over the bus.
    poll(lambda: cluster.http.get("/readyz").json()["ready"], cluster.log)
