"""A job of two ranks on each of three nodes, and what a fleet finds and captures of it."""

from pathlib import Path
from typing import Any

from tests.loop.cluster import LoopCluster
from tests.loop.node import poll

RANKS_A_NODE = 2
NODES = ["gpu-1", "gpu-1", "gpu-2", "gpu-2", "gpu-3", "gpu-3"]


def trained(cluster: LoopCluster, job: str) -> Path:
    faults = cluster.torchrun(job, RANKS_A_NODE)
    is_judged(cluster, job, len(NODES))
    assert [rank["host"] for rank in cluster.get("ranks", job=job)] == NODES
    return faults


def is_judged(cluster: LoopCluster, job: str, ranks: int) -> None:
    """Wait until a rank of the job that gets slow would be found."""

    def is_known() -> bool:
        seen = cluster.get("detectors", kind="straggler", job=job)
        return [[one["answer"] for one in of["readings"]] for of in seen] == [["fine"] * ranks]

    poll(is_known, cluster.log)


def only_anomaly(cluster: LoopCluster, kind: str) -> Any:
    """The one of this kind, once it is there; no agent has one of its own."""
    poll(lambda: cluster.anomalies(kind), cluster.log)
    assert [node.anomalies(kind) for node in cluster.nodes] == [[]] * len(cluster.nodes)
    (anomaly,) = cluster.anomalies(kind)
    assert anomaly["judged_by"] == "fleet"
    return anomaly


def capture_of(cluster: LoopCluster, anomaly: Any) -> Any:
    """The one that the anomaly asked for, once it has ended; an evaluation may have interrupted one
    before it."""

    def those() -> list[Any]:
        asked = cluster.captures(anomaly_id=anomaly["id"])
        return asked if asked and asked[-1]["outcome"] not in (None, "failed") else []

    *interrupted, capture = poll(those, cluster.log)
    assert len(interrupted) <= 1
    return capture


def captured_straggler(cluster: LoopCluster) -> Any:
    """Return the whole capture of a job whose rank 4 gets slow, and whose diagnosis names it."""
    faults = trained(cluster, "slow")
    (faults / "fault").write_text("slower_forward 4")
    straggler = only_anomaly(cluster, "straggler")
    assert (straggler["rank"], straggler["node"]) == (4, "gpu-3")
    capture = capture_of(cluster, straggler)
    assert (capture["outcome"], capture["detail"]) == ("complete", ""), cluster.log()
    ranks = [(one["rank"], one["state"], one["node"]) for one in capture["ranks"]]
    assert ranks == [(rank, "written", NODES[rank]) for rank in range(6)]
    # All of them sleep for most of a step, which is the host's own work, too.
    (late,) = [one for one in capture["diagnosis"]["findings"] if one["kind"] == "straggler"]
    assert (late["rank"], late["node"]) == (4, "gpu-3")
    assert late["evidence"][0].startswith("rank 4 on gpu-3 keeps the others waiting")
    report = cluster.http.get(f"/api/v1/captures/{capture['id']}/report.html")
    assert "rank 4 on gpu-3" in report.text
    return capture
