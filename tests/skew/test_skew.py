"""Versions that meet: what released shims and agents wrote, and what later ones may write.

The files here were recorded with those releases: a ring after 42 steps, and a stream with every
type of line.
"""

import gzip
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.daemon.ranks.sources import RankNode
from tests.fleet.nodes import NOW, TestCluster, TestNode, seen, step
from warpwatch._version import __version__
from warpwatch_fleet.cluster import Cluster
from warpwatch_fleet.node import Node

FOLDER = Path(__file__).parent
RING = "skew-r1-11ddc1d5ca6aec48.ring"
STREAM = gzip.decompress((FOLDER / "agent-0.2.0.jsonl.gz").read_bytes()).splitlines()
LATER: dict[str, Any] = {"tomorrow": {"deep": [1]}}


@pytest.fixture
def node(tmp_path: Path) -> Iterator[RankNode]:
    node = RankNode(tmp_path)
    yield node
    node.close()


@pytest.mark.parametrize("version", ["0.1.0", "0.2.0"])
def test_the_ring_of_a_released_shim_is_read_in_full(node: RankNode, version: str) -> None:
    ring = gzip.decompress((FOLDER / f"shim-{version}.ring.gz").read_bytes())
    (node.folder.ranks / RING).write_bytes(ring)
    assert node.steps() == list(range(42))
    (state,) = node.states()
    assert (state.job, state.rank, state.client) == ("skew", 1, version)
    assert (state.steps_total, state.samples_total, state.tokens_total) == (42, 21 * 8, 21 * 64)
    assert 0 < state.phases_s["comm"] < state.durations.sum
    assert node.rejects == {}


def test_of_a_shim_of_the_next_version_all_but_what_is_new_is_read(node: RankNode) -> None:
    ring = node.ring(None, client="0.3.0", **LATER)
    ring.step()
    ring.record(99, b"tomorrow")
    ring.event("tomorrow", deep=1)
    ring.event("gc_pause", duration_s=0.1, generation=2, step=0, tomorrow=1)
    ring.step()
    assert node.steps() == [0, 1]
    assert (node.newest().client, node.rejects) == ("0.3.0", {})


def later(line: bytes) -> bytes:
    """Return the line as an agent of the next version may write it."""
    said: dict[str, Any] = json.loads(line) | LATER
    if isinstance(nested := said.get(said["type"]), dict):
        nested |= LATER
    return json.dumps(said | ({"version": "0.3.0"} if said["type"] == "cursor" else {})).encode()


def told(*lines: bytes) -> tuple[Cluster, Node]:
    fleet = TestCluster(TestNode("gpu-1"))
    (address,) = fleet.cluster.nodes
    fleet.cluster.feed(address, [lines[-1], *lines], NOW + 20)
    node = fleet.cluster.nodes[address]
    node.up, node.reason = True, ""
    return fleet.cluster, node


def known(cluster: Cluster, node: Node) -> list[Any]:
    (job,) = cluster.jobs.values()
    ((device, sample),) = node.samples.items()
    (run,) = node.runs()
    return [
        job.id,
        sorted(job.members),
        job.state().ranks,
        (device, sample.values),
        run,
        [one.id for one in node.shown_captures()],
        [one.summary for one in node.anomalies()],
    ]


def test_the_stream_of_an_agent_of_the_last_release_is_understood() -> None:
    cluster, node = told(*STREAM)
    assert (node.version, node.newer, node.refused) == ("0.2.0", 0, {})
    job, members, _, (device, values), _, captures, anomalies = known(cluster, node)
    assert (job, members, device) == (("ns/team", "llama", "41"), [0, 1], "GPU-0")
    assert values == {("device_power_watts", ()): 400, ("device_temperature_celsius", ("gpu",)): 61}
    assert (captures, anomalies) == (["20260921T150000-aaaaaa"], ["XID 79"])
    assert node.health(NOW + 20).reason == ""


def test_of_an_agent_of_the_next_version_all_but_what_is_new_is_used_and_it_is_said() -> None:
    changed = [later(line) for line in STREAM]
    new = b'{"type":"tomorrow","time":1,"deep":[{}]}'
    cluster, node = told(new, *changed)
    assert known(cluster, node) == known(*told(*STREAM))
    # The first line names the agent; of events the fields are free.
    events = sum(b'"event"' in line for line in STREAM)
    assert (node.newer, node.refused) == (1 + len(STREAM) - events, {})
    said = f"its agent is 0.3.0, this fleet {__version__}: {node.newer} lines have types or fields"
    assert node.health(NOW + 20).reason.startswith(said)


class SkewedNode(TestNode):
    """An agent that writes its lines as another version does."""

    def __init__(self, name: str, write: Callable[[bytes], bytes]) -> None:
        super().__init__(name)
        self.write = write

    def lines(self, now: float) -> list[bytes]:
        return [self.write(line) for line in super().lines(now)]


def older(line: bytes) -> bytes:
    """Return the line as the last release wrote it: without what has been added since."""
    added = {"index", "driver_load", "slot"}
    said = {name: value for name, value in json.loads(line).items() if name not in added}
    return json.dumps(said | ({"version": "0.2.0"} if said["type"] == "cursor" else {})).encode()


def test_a_straggler_is_found_among_agents_of_three_versions() -> None:
    nodes = SkewedNode("gpu-1", older), TestNode("gpu-2"), SkewedNode("gpu-3", later)
    fleet = TestCluster(*nodes)
    for number, one in enumerate(nodes):
        one.say(seen(number, world=3))
    for number in range(1, 361):
        fleet.now += 0.5
        for rank, one in enumerate(nodes):
            slow_s = 0.25 * (number > 300)
            phases = {"comm": 0.05 + slow_s * (rank != 2)}
            one.say(step(rank, number, fleet.now, 0.5 + slow_s, phases_s=phases))
        if number % 5 == 0:
            fleet.hear()
    (found,) = fleet.anomalies()
    assert (found.kind, found.rank, found.node) == ("straggler", 2, "gpu-3")
    versions = {one.name: one.version for one in fleet.cluster.nodes.values()}
    assert versions == {"gpu-1": "0.2.0", "gpu-2": "0.1.0", "gpu-3": "0.3.0"}
