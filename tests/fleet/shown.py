"""States for a fleet's page: jobs of any size with one slow rank, nodes, runs."""

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.daemon.http.conftest import MemoryAgent, gpu, link_to, servers
from tests.fleet.nodes import NOW, OWNER
from warpwatch_fleet.fleet import FleetPage
from warpwatch_serving.server import Server
from warpwatch_telemetry.anomalies import Anomaly
from warpwatch_telemetry.samples import Device, DeviceSample, SourceHealth
from warpwatch_telemetry.state import JobState, RankState, State

STEP_S = 0.48


def rank(number: int, world: int, host: str, slow: bool, job: str = "llama-70b") -> RankState:
    noise = random.Random(number).gauss(0, 0.005)
    own_s = (0.41 if slow else 0.25) * (1 + noise)
    return RankState(
        job=job, rank=number, name=str(number), pid=0, host=host, owner=OWNER, run="41",
        world_size=world, step=4180, steps_total=4180, steps_per_s=1 / STEP_S,
        tokens_per_s=32768 / STEP_S, comm_s=STEP_S - own_s, recent_s=(STEP_S,) * 40,
    )  # fmt: skip


def straggler(number: int, node: str) -> Anomaly:
    summary = f"rank {number} computes 64 % longer than its peers since step 4100"
    return Anomaly(
        NOW - 41, "warning", summary, id="a1", kind="straggler", job="llama-70b", owner=OWNER,
        run="41", rank=number, begin_step=4100, node=node, judged_by="fleet",
    )  # fmt: skip


def fleet_state(world: int, on_a_node: int, slow: int | None) -> State:
    """One job over as many nodes as it needs; ``slow``: which rank is."""
    hosts = [f"gpu-{number // on_a_node + 1:03}" for number in range(world)]
    ranks = tuple(rank(n, world, hosts[n], n == slow) for n in range(world))
    job = JobState("llama-70b", world, tuple(r.name for r in ranks), owner=OWNER, run="41")
    found = () if slow is None else (straggler(slow, hosts[slow]),)
    state = State(NOW, "0.1.0", "fleet-0", ranks=ranks, jobs=(job,), anomalies=found)
    return with_nodes(state, node(1), node(2, hot=True), node(3))


def node(
    number: int, up: bool = True, hot: bool = False, late_s: float = 0.4
) -> tuple[SourceHealth, list[DeviceSample]]:
    reason, name = "" if up else "ConnectError: connection refused", f"gpu-{number:03}"
    samples = []
    for index in range(8):
        values = dict(gpu(index % 2).values)
        if hot and index == 5:
            values["device_throttle_active", ("hw_thermal",)] = 1.0
        device = Device(f"GPU-{number:03}-{index}", index, "")
        samples.append(DeviceSample(device, NOW, values, source=name))
    return SourceHealth(name, up, reason, lag_s=late_s), samples


def with_nodes(state: State, *nodes: tuple[SourceHealth, list[DeviceSample]]) -> State:
    sources, devices = zip(*nodes, strict=True)
    return replace(state, sources=sources, devices=tuple(itertools.chain(*devices)))


def crowded_state() -> State:
    """Return 250 nodes with 8 ranks each of 189 jobs: 2 stragglers, 30 stalls, a lost GPU."""
    sizes = (256, 160, 96, 64, *16 * [32], *67 * [6], *102 * [5])
    owners, places = ("ns/nlp", "ns/vision", "uid/1004"), itertools.count()
    ranks: list[RankState] = []
    jobs: list[JobState] = []
    found: list[Anomaly] = []
    for number, size in enumerate(sizes):
        name = f"llama-{number}"
        about: dict[str, Any] = {"owner": owners[number % 3], "run": str(number)}
        slow = size // 2 if number in (0, 4) else None
        hosts = [f"gpu-{next(places) // 8 + 1:03}" for _ in range(size)]
        ranks += [replace(rank(n, size, hosts[n], n == slow, name), **about) for n in range(size)]
        jobs.append(JobState(name, size, tuple(map(str, range(size))), **about))
        if slow is not None:
            of_this = {"id": f"a{number}", "job": name, **about}
            found.append(replace(straggler(slow, hosts[slow]), **of_this))
        elif 40 <= number < 70:
            said = {"kind": "data_stall", "summary": "ranks wait for data 41 % of the step"}
            of_this = {"id": f"a{number}", "job": name, "rank": None, **said, **about}
            found.append(replace(straggler(0, hosts[0]), **of_this))
    lost = Anomaly(NOW - 700, "critical", "XID 79 (GPU has fallen off the bus)", id="x1",
                   kind="xid", node="gpu-155", device="GPU-155-2")  # fmt: skip
    anomalies = (*found, lost)
    state = State(
        NOW, "0.2.0", "fleet-0", ranks=tuple(ranks), jobs=tuple(jobs), anomalies=anomalies
    )
    return with_nodes(state, *(node(n, up=n > 3, hot=n == 77) for n in range(1, 251)))


@pytest.fixture
def fleet(tmp_path: Path) -> MemoryAgent:
    """A fleet whose state the test sets."""
    fleet = MemoryAgent(tmp_path)
    fleet.now = fleet_state(6, 2, 4)
    return fleet


@pytest.fixture
def server(fleet: MemoryAgent) -> Iterator[Server]:
    with servers(fleet) as serve:
        yield serve(page=FleetPage(fleet))


@pytest.fixture
def url(server: Server) -> str:
    return server.url.rstrip("/") + link_to(server)
