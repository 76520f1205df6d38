"""A healthy training, with evaluations and with checkpoints that a hook sees and that none does."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from tests.loop.node import LoopNode, loop_node
from tests.loop.trainings import ON_A_BUSY_MACHINE, Job

# `make soak` takes 30.
MINUTES = float(os.environ.get("SOAK_MINUTES", "3"))
POLL_S = 5.0
# These have learned what is usual by the end, and could have seen that something is not.
JUDGED = ("hang", "data_stall", "gc_pause", "straggler", "comm_slow", "step_regression")


def answers(node: LoopNode, kind: str) -> set[str]:
    said = node.http.get("/api/v1/detectors", params={"kind": kind}).json()
    (detector,) = said["detectors"]
    return {reading["answer"] for reading in detector["readings"]}


@pytest.mark.slow
@pytest.mark.torch
def test_nothing_is_found_in_a_healthy_training(tmp_path: Path) -> None:
    config: dict[str, Any] = {
        "detection": ON_A_BUSY_MACHINE,
        "exporters": {"jsonl": {"path": str(tmp_path / "telemetry.jsonl")}},
        "sources": {"nvml": {"enabled": False}},
    }
    with loop_node(tmp_path, **config) as node:
        node.start_daemon()
        job = Job(node, "healthy")
        job.has_trained(20)
        end = time.monotonic() + 60 * MINUTES
        while time.monotonic() < end:
            time.sleep(POLL_S)
            assert job.anomalies() == [], node.log("daemon")
            assert [process.poll() for process in job.processes] == [None] * len(job.processes)
        assert "ERROR" not in node.log("daemon")
        assert min(rank["steps_total"] for rank in node.get("ranks")) > 2 * 60 * MINUTES
        assert {kind: answers(node, kind) for kind in JUDGED} == {kind: {"fine"} for kind in JUDGED}
