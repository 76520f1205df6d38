"""Acceptance: what goes wrong in a real training is found once, by its name and with its rank."""

import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.loop.node import LoopNode, loop_node
from tests.loop.trainings import ALL, NOT_CAPTURED, ON_A_BUSY_MACHINE, Job

pytestmark = [pytest.mark.loops, pytest.mark.torch]


@pytest.fixture
def node(tmp_path: Path) -> Iterator[LoopNode]:
    config: dict[str, Any] = {
        "detection": ON_A_BUSY_MACHINE,
        "exporters": {"jsonl": {"path": str(tmp_path / "telemetry.jsonl")}},
        "sources": {"nvml": {"enabled": False}},
        "triggers": {"captures_per_hour": 100, "cooldown_s": 0, "recipes": NOT_CAPTURED},
    }
    with loop_node(tmp_path, **config) as node:
        node.start_daemon()
        yield node
        assert "ERROR" not in node.log("daemon")


def goes_wrong_for_a_while(job: Job, fault: str, ranks: tuple[int, ...], kind: str) -> None:
    job.go_wrong({fault: ranks})
    job.found(kind)
    job.go_wrong({})
    job.over(kind)


def test_seven_faults_one_after_the_other_are_found_once_with_their_rank(node: LoopNode) -> None:
    job = Job(node, "faulty")
    job.has_trained(300)
    assert job.named() == [], node.log("daemon")
    goes_wrong_for_a_while(job, "slow_collate", (2,), "data_stall")
    goes_wrong_for_a_while(job, "metrics", ALL, "step_regression")
    goes_wrong_for_a_while(job, "slow_forward", (1,), "straggler")
    job.go_wrong({"collect": (1,), "leak": (3,)})
    job.found("gc_pause")
    # It is judged over 600 steps.
    job.found("memory_leak")
    job.go_wrong({})
    job.over("memory_leak")
    stopped_at = time.time()
    job.processes[2].send_signal(signal.SIGSTOP)
    assert job.found("hang")["time"] < stopped_at + 30
    job.processes[2].send_signal(signal.SIGCONT)
    job.over("hang")
    job.processes[3].kill()
    job.found("crash")
    job.has_ended()
    assert job.named() == [
        ("data_stall", 2),
        ("step_regression", None),
        ("straggler", 1),
        ("gc_pause", 1),
        ("memory_leak", 3),
        ("hang", 2),
        ("crash", 3),
    ], node.log("daemon")


def test_a_rank_that_waits_for_ever_is_a_hang_within_half_a_minute(node: LoopNode) -> None:
    job = Job(node, "stuck")
    job.has_trained(60)
    stuck_at = time.time()
    job.go_wrong({"stuck": (2,)})
    # Only the activity of processes and devices shows it so soon: a minute has many silent ones.
    assert job.found("hang")["time"] < stuck_at + 30
    job.go_wrong({})
    job.over("hang")
    job.has_trained(120)
    assert job.named() == [("hang", 2)], node.log("daemon")
