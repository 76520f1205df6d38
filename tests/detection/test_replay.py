"""A log of records through the engine: made ones, and those that daemons recorded."""

import re
from pathlib import Path

import pytest

from tests.cases import cases
from tests.detection.streams import EPOCH_S, Job, kinds_of, slow_rank
from warpwatch_daemon.cli.replay import LogReader, read_lines
from warpwatch_detection.detectors.hang import Hang
from warpwatch_detection.replay import LogReplay


@pytest.mark.parametrize(("until", "step"), [(300, 300), (EPOCH_S, None)])
def test_a_replay_stops_before_a_step_or_a_time(until: float, step: int | None) -> None:
    records = slow_rank(300, 200)
    assert list(LogReplay().run(records, until=until)) == []
    assert (getattr(record := next(records), "step", None), record.rank) == (step, 1)
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
    records, replay = [], LogReplay(explain=True)
    for _ in range(2):
        records += [*job.steps(600), *job.steps(100, wait=lambda *_: 0.3)]
        records += job.steps(100, wait=lambda *_: 0.3, compute=lambda *_: 0.2)
    assert [anomaly.kind for anomaly in replay.run(records)] == ["data_stall", "data_stall"]
    reported = [(one.kind, one.cause) for one in replay.suppressed()]
    assert reported.count(("step_regression", "data_stall")) == 2


def test_a_replay_raises_the_error_of_a_detector(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Hang, "observe", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        list(LogReplay().run(slow_rank(1, 1)))


LOGS = Path(__file__).with_name("logs")


@pytest.mark.parametrize(("log", "expected"), cases(__file__)["recorded"].items())
def test_what_is_found_in_recorded_logs_and_said_of_them(log, expected, golden_case):
    replay, said = LogReplay(explain=True), []
    for anomaly in replay.run(LogReader().records(read_lines(LOGS / f"{log}.jsonl.gz"))):
        statuses = (f"  {kind} {one.rank} {one.text}" for kind, one in replay.statuses())
        said += [f"{anomaly.kind} {anomaly.rank} at {anomaly.time:.3f}", *statuses]
    said += [f"{kind} {one.rank} {one.answer} {one.text}" for kind, one in replay.statuses()]
    said += map(str, (*replay.anomalies.values(), *replay.suppressed()))
    # The last digits differ between mathematical libraries.
    digits = re.compile(r"\d+\.\d{7,}(e-\d+)?")
    golden_case(digits.sub(lambda number: f"{float(number[0]):.6f}", "\n".join(said)), log)
    assert kinds_of(replay.anomalies.values()) == [tuple(one) for one in expected]
