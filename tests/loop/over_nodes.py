"""A job of two ranks on each of three nodes, and what a fleet finds and captures of it."""

from pathlib import Path
from typing import Any

from tests.loop.cluster import LoopCluster
from tests.loop.node import poll

RANKS_A_NODE = 2
NODES = ["gpu-1", "gpu-1", "gpu-2", "gpu-2", "gpu-3", "gpu-3"]


def trained(cluster: LoopCluster, job: str) -> Path:
    faults = cluster.torchrun(job, RANKS_A_NODE)

    def is_known() -> bool:
        seen = cluster.get("detectors", kind="straggler", job=job)
        return [[one["answer"] for one in of["readings"]] for of in seen] == [["fine"] * 6]

    poll(is_known, cluster.log)
    assert [rank["host"] for rank in cluster.get("ranks", job=job)] == NODES
    return faults


def only_anomaly(cluster: LoopCluster, kind: str) -> Any:
    """The one of this kind, once it is there; no agent has one of its own."""

    def those() -> list[Any]:
        return [one for one in cluster.get("anomalies") if one["kind"] == kind]

    poll(those, cluster.log)
    for node in cluster.nodes:
        assert [one for one in node.get("anomalies") if one["kind"] == kind] == []
    (anomaly,) = those()
    assert anomaly["judged_by"] == "fleet"
    return anomaly


def capture_of(cluster: LoopCluster, anomaly: Any) -> Any:
    """The one that the anomaly asked for, once it has ended; an evaluation may have interrupted one
    before it."""

    def those() -> list[Any]:
        asked = [
            one for one in cluster.get("captures") if one["request"]["anomaly_id"] == anomaly["id"]
        ]
        return asked if asked and asked[-1]["outcome"] not in (None, "failed") else []

    *interrupted, capture = poll(those, cluster.log)
    assert len(interrupted) <= 1
    return capture
