"""Logs that daemons recorded beside real trainings (tests/loop/training.py): found is what was."""

from __future__ import annotations

from pathlib import Path

from warpwatch_daemon.cli.log_file import LogReader, read_lines
from warpwatch_detection.replay import Replay

LOGS = Path(__file__).with_name("logs")


def found(log: str) -> list[tuple[str, int | None]]:
    records = LogReader().records(read_lines(LOGS / log))
    return [(anomaly.kind, anomaly.rank) for anomaly in Replay().run(records)]


def test_faults_one_after_the_other_are_found_once_each() -> None:
    # A leak of half a minute besides is too short to be judged.
    assert found("seven_faults.jsonl.gz") == [
        ("data_stall", 2),
        ("step_regression", None),
        ("straggler", 1),
        ("gc_pause", 1),
        ("hang", 2),
        ("crash", 3),
    ]


def test_the_rank_that_raised_is_found_and_not_those_that_lost_it() -> None:
    assert found("exception.jsonl.gz") == [("crash", 1)]


def test_of_minutes_of_healthy_training_on_a_busy_machine_nothing_is_found() -> None:
    assert found("healthy.jsonl.gz") == []


def test_what_ended_says_what_it_was_at_its_worst() -> None:
    replay = Replay()
    assert (
        len(list(replay.run(LogReader().records(read_lines(LOGS / "seven_faults.jsonl.gz"))))) == 6
    )
    stall, regression, straggler, *_ = replay.anomalies.values()
    assert stall.summary == "rank 2 waits for data 18 % of the time instead of 2 %, since step 296"
    assert regression.summary.startswith("steps take 20 % longer since step 440")
    assert straggler.summary == "rank 1 computes 25 % longer than its 3 peers since step 512"
    assert straggler.worst is not None
    assert (straggler.worst.step, straggler.worst.value) == (539, straggler.value)
