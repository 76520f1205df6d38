"""A log of records through the engine: made ones, and those that daemons recorded."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cases import cases
from tests.detection.streams import EPOCH_S, Job, kinds_of, slow_rank
from warpwatch_daemon.cli.replay import LogReader, read_lines
from warpwatch_detection.replay import LogReplay


@pytest.mark.parametrize("until", [300, EPOCH_S + 50])
def test_a_replay_stops_before_a_step_or_a_time(until: float) -> None:
    assert list(LogReplay().run(slow_rank(300, 200), until=until)) == []
    # The steps of another job do not count.
    found = LogReplay().run(slow_rank(300, 200), until=until, job="other")
    assert len(list(found)) == (until == 300)


def test_what_a_replay_found_is_kept_with_its_end_and_its_last_status() -> None:
    replay = LogReplay(explain=True)
    (straggler,) = list(replay.run(slow_rank(300, 200)))
    assert (straggler.kind, straggler.rank, straggler.end_time) == ("straggler", 1, None)
    assert replay.anomalies[straggler.id].end_time is not None
    answers = {(kind, one.job, one.rank): one.answer for kind, one in replay.statuses()}
    assert [key for key, answer in answers.items() if answer == "found"] == [
        ("straggler", "llama", 1)
    ]
    assert answers["straggler", "llama", 0] == "fine"


def test_what_a_cause_explains_is_found_as_suppressed() -> None:
    job = Job(ranks=2, step_s=0.5, noise=0.02)
    records = [*job.steps(300), *job.steps(100, wait=lambda *_: 0.3)]
    records += job.steps(100, wait=lambda *_: 0.3, compute=lambda *_: 0.2)
    replay = LogReplay(explain=True)
    assert [anomaly.kind for anomaly in replay.run(records)] == ["data_stall"]
    reported = {(one.kind, one.cause) for one in replay.suppressed()}
    assert ("step_regression", "data_stall") in reported


LOGS = Path(__file__).with_name("logs")


def found(log: str, golden_case: Callable[..., None]) -> LogReplay:
    """Replay a log; all that is said while it is read and at its end is a golden file."""
    replay, said = LogReplay(explain=True), []
    for anomaly in replay.run(LogReader().records(read_lines(LOGS / f"{log}.jsonl.gz"))):
        statuses = (f"  {kind} {one.rank} {one.text}" for kind, one in replay.statuses())
        said += [f"{anomaly.kind} {anomaly.rank} at {anomaly.time:.3f}", *statuses]
    said += [f"{kind} {one.rank} {one.answer} {one.text}" for kind, one in replay.statuses()]
    said += [str(one) for one in replay.anomalies.values()]
    said += [str(one) for one in replay.suppressed()]
    # The last digits differ between mathematical libraries.
    digits = re.compile(r"\d+\.\d{7,}(e-\d+)?")
    golden_case(digits.sub(lambda number: f"{float(number[0]):.6f}", "\n".join(said)), log)
    return replay


def test_faults_one_after_the_other_are_found_once_each_and_told_at_their_worst(
    golden_case: Callable[..., None],
) -> None:
    replay = found("seven_faults", golden_case)
    # A leak of half a minute besides is too short to be judged.
    assert kinds_of(replay.anomalies.values()) == [
        ("data_stall", 2),
        ("step_regression", None),
        ("straggler", 1),
        ("gc_pause", 1),
        ("hang", 2),
        ("crash", 3),
    ]
    stall, regression, straggler, *_ = replay.anomalies.values()
    assert stall.summary == "rank 2 waits for data 18 % of the time instead of 2 %, since step 296"
    assert regression.summary.startswith("steps take 20 % longer since step 440")
    assert straggler.summary == "rank 1 computes 25 % longer than its 3 peers since step 512"
    assert (straggler.worst.step, straggler.worst.value) == (539, straggler.value)


@pytest.mark.parametrize(("log", "expected"), cases(__file__)["recorded"].items())
def test_nothing_else_is_found_in_recorded_logs(log, expected, golden_case):
    kinds = kinds_of(found(log, golden_case).anomalies.values())
    assert kinds == [tuple(one) for one in expected]
