"""A log of records through the engine: made ones, and those that daemons recorded."""

import re
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
