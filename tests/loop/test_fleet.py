"""A job over two nodes, a fleet over their agents: one fault is one anomaly, with its node."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.loop.cluster import loop_cluster
from tests.loop.node import poll
from tests.loop.trainings import ON_A_BUSY_MACHINE, RANKS


@pytest.mark.slow
@pytest.mark.torch
def test_a_straggler_of_a_job_over_two_nodes_is_named_once_with_its_node(tmp_path: Path) -> None:
    with loop_cluster(tmp_path, 2, detection=ON_A_BUSY_MACHINE) as cluster:
        cluster.start()
        faults = cluster.train("both", WARPWATCH_RUN="first")

        def is_known() -> bool:
            """How the ranks compare in health."""
            seen = cluster.get("detectors", kind="straggler", job="both")
            return [[one["answer"] for one in of["readings"]] for of in seen] == [["fine"] * RANKS]

        poll(is_known, 300, cluster.log())
        ranks = cluster.get("ranks", job="both")
        assert [rank["host"] for rank in ranks] == ["gpu-1", "gpu-1", "gpu-2", "gpu-2"]
        (faults / "fault").write_text("slow_forward 3")
        (found,) = poll(
            lambda: [one for one in cluster.get("anomalies") if one["kind"] == "straggler"],
            120,
            cluster.log(),
        )
        assert (found["rank"], found["node"], found["judged_by"]) == (3, "gpu-2", "fleet")
        assert found["summary"].endswith("(on gpu-2)")
        for node in cluster.nodes:
            assert [one for one in node.get("anomalies") if one["kind"] == "straggler"] == []
