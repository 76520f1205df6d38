"""Logs that daemons recorded beside real trainings (tests/loop/training.py): found is what was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.loop.trainings import QUICK_LEAK
from warpwatch_daemon.cli.log_file import LogReader, read_lines
from warpwatch_detection.config import DetectionConfig
from warpwatch_detection.replay import Replay

LOGS = Path(__file__).with_name("logs")


def told(log: str, **detectors: Any) -> list[tuple[str, int | None]]:
    replay = Replay(DetectionConfig.model_validate(detectors))
    records = LogReader().records(read_lines(LOGS / log))
    return [(anomaly.kind, anomaly.rank) for anomaly in replay.run(records)]


def test_seven_faults_one_after_the_other_are_told_once_each() -> None:
    assert told("seven_faults.jsonl.gz", memory_leak=QUICK_LEAK) == [
        ("data_stall", 2),
        ("step_regression", None),
        ("straggler", 1),
        ("gc_pause", 1),
        ("memory_leak", 3),
        ("hang", 2),
        ("crash", 3),
    ]


def test_the_rank_that_raised_is_told_and_not_those_that_lost_it() -> None:
    assert told("exception.jsonl.gz") == [("crash", 1)]


def test_of_minutes_of_healthy_training_on_a_busy_machine_nothing_is_told() -> None:
    assert told("healthy.jsonl.gz") == []
