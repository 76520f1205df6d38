"""A job over two nodes, a fleet over their agents: one fault is one anomaly and one capture."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.exporters.receiver import Receiver, receiver
from tests.loop.cluster import LoopCluster, loop_cluster
from tests.loop.node import poll
from tests.loop.trainings import ON_A_BUSY_MACHINE, RANKS

pytestmark = [pytest.mark.loops, pytest.mark.torch]

NODES = ["gpu-1", "gpu-1", "gpu-2", "gpu-2"]


@pytest.fixture
def hook() -> Iterator[Receiver]:
    with receiver() as server:
        yield server


@pytest.fixture
def cluster(tmp_path: Path, hook: Receiver) -> Iterator[LoopCluster]:
    exporters = {"webhooks": [{"url": hook.url}]}
    with loop_cluster(tmp_path, 2, detection=ON_A_BUSY_MACHINE, exporters=exporters) as cluster:
        cluster.start()
        yield cluster


def found(cluster: LoopCluster, kind: str) -> Any:
    """The only anomaly of this kind, once it is there; no agent has one of its own."""

    def those() -> list[Any]:
        return [one for one in cluster.get("anomalies") if one["kind"] == kind]

    (anomaly,) = poll(those, cluster.log())
    for node in cluster.nodes:
        assert [one for one in node.get("anomalies") if one["kind"] == kind] == []
    return anomaly


def captured(cluster: LoopCluster, anomaly: Any) -> Any:
    """The only capture that the anomaly asked for, once it has ended."""

    def those() -> list[Any]:
        asked = [
            one for one in cluster.get("captures") if one["request"]["anomaly_id"] == anomaly["id"]
        ]
        return asked if all(one["outcome"] for one in asked) else []

    (capture,) = poll(those, cluster.log())
    return capture


def test_a_straggler_and_a_hang_over_two_nodes_are_named_and_captured_once(
    cluster: LoopCluster, hook: Receiver
) -> None:
    faults = cluster.train("both", WARPWATCH_RUN="first")

    def is_known() -> bool:
        """How the ranks compare in health."""
        seen = cluster.get("detectors", kind="straggler", job="both")
        return [[one["answer"] for one in of["readings"]] for of in seen] == [["fine"] * RANKS]

    poll(is_known, cluster.log())
    assert [rank["host"] for rank in cluster.get("ranks", job="both")] == NODES
    (faults / "fault").write_text("slow_forward 3")
    straggler = found(cluster, "straggler")
    assert (straggler["rank"], straggler["node"], straggler["judged_by"]) == (3, "gpu-2", "fleet")
    assert straggler["summary"].endswith("(on gpu-2)")
    capture = captured(cluster, straggler)
    assert (capture["outcome"], capture["detail"]) == ("complete", ""), cluster.log()
    ranks = [(one["rank"], one["state"], one["node"]) for one in capture["ranks"]]
    assert ranks == [(rank, "written", NODES[rank]) for rank in range(RANKS)]
    assert {one["first_step"] for one in capture["ranks"]} == {capture["start_step"]}
    for node in cluster.nodes:
        own = [one for one in node.get("captures") if one["outcome"] == "complete"]
        assert [one["id"][:22] for one in own] == [capture["id"]]
        assert [one["start_step"] for one in own] == [capture["start_step"]]

    (stopped,) = [one for one in cluster.nodes[0].get("ranks") if one["rank"] == 1]
    os.kill(stopped["pid"], signal.SIGSTOP)
    hang = found(cluster, "hang")
    assert (hang["rank"], hang["node"], hang["judged_by"]) == (1, "gpu-1", "fleet")
    stacks = captured(cluster, hang)
    assert stacks["request"]["kind"] == "stacks"
    states = {one["rank"]: one["state"] for one in stacks["ranks"]}
    assert [states[rank] for rank in (0, 2, 3)] == ["written"] * 3, stacks
    os.kill(stopped["pid"], signal.SIGCONT)
    # Agents and fleet have the same webhook: one fault is one message, from the fleet.
    told = [json.loads(body) for body in hook.bodies()]
    opened = [one["anomaly"] for one in told if one["event"] == "anomaly_opened"]
    assert [ident for ident in opened if ident in (straggler["id"], hang["id"])] == [
        straggler["id"],
        hang["id"],
    ]
    verdicts = [one["anomaly"] for one in told if one["event"] == "verdict"]
    assert verdicts.count(straggler["id"]) == 1
    kinds = Counter(one["kind"] for one in told if one["event"] == "anomaly_opened")
    assert (kinds["straggler"], kinds["hang"]) == (1, 1)
