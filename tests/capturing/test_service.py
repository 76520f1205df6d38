"""The state machine of captures, with participants that the test plays."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.capturing.played import JOB, REQUEST, Played, PlayedService
from warpwatch_telemetry.captures import Capture, Prepared
from warpwatch_telemetry.errors import Refused

STACKS = replace(REQUEST, kind="stacks", anomaly_kind="hang")


@pytest.fixture
def played(tmp_path: Path) -> PlayedService:
    return PlayedService(tmp_path)


def ready(begun: int, steps: int = 3, step_s: float = 0.1) -> Prepared:
    return Prepared((), steps, begun, step_s)


def armed(
    played: PlayedService, *places: Played, begun: int = 100, last: Exception | None = None
) -> bool:
    """All have prepared and been told the start step, to which the last one answers ``last``."""
    for one in places:
        one.answers(ready(begun))
    played.step()
    for one in places:
        one.answers(last if one is places[-1] else None)
    return played.step()


def states(capture: Capture) -> list[str]:
    return [rank.state for rank in capture.ranks]


def test_the_slowest_answer_and_the_fastest_rank_choose_the_start_of_all(played):
    asked, first, second = played.ask()
    assert (asked.start_step, states(asked)) == (None, ["asked"] * 4)
    first.answers(ready(300))
    played.step(after_s=1.0)
    assert first.requests == ["prepare"]
    second.answers(ready(310, steps=2, step_s=0.3))
    played.step()
    # 2 s of steps of 0.2 s at the median, and 1 s that the second took to answer.
    assert first.requests[1:] == second.requests[1:] == ["arm 1: 325"]
    capture = played.capture(asked)
    assert (capture.start_step, capture.steps) == (325, 2)
    for one in (first, second):
        assert played.step() is True
        one.answers()
        one.set_all("exported")
    assert played.step() is False
    capture = played.finished(asked)
    assert (states(capture), capture.end_time is None) == (["written"] * 4, False)


def test_a_rank_that_is_late_ends_the_try_and_a_later_step_is_chosen(played):
    _, first, second = played.ask()
    armed(played, first, second)
    first.set_all("armed")
    second.set_all("late")
    played.step()
    assert first.requests[-1] == second.requests[-1] == "withdraw"
    # Two services that want the same ranks do not meet again at the same time.
    played.step(after_s=0.05)
    assert first.requests[-1] == "withdraw"
    second.is_awaited = True
    played.step(after_s=1.0)
    assert first.requests[-1] == "withdraw"
    second.answers()
    played.step()
    armed(played, first, second, begun=200)
    assert first.requests[-2:] == ["prepare", "arm 2: 240"]


def test_a_trace_that_is_there_is_not_discarded_for_a_rank_that_is_late(played):
    _, first, second = played.ask()
    armed(played, first, second)
    first.set_all("exported")
    second.set_all("late")
    played.step()
    assert "withdraw" not in first.requests


def test_one_refusal_to_arm_ends_the_capture_everywhere_and_leaves_no_folder(played):
    asked, first, second = played.ask()
    assert armed(played, first, second, last=Refused("refused_quota", "too much")) is False
    capture = played.capture(asked)
    assert (capture.outcome, capture.detail) == ("refused_quota", "gpu-2: too much")
    assert first.requests[-1] == second.requests[-1] == "withdraw"
    assert list(played.store.path.glob("*/*/*/*")) == []
    assert not played.service.is_busy(JOB)


def test_a_busy_rank_is_tried_again_and_refused_in_the_end(played):
    asked, first, second = played.ask()
    for _ in range(3):
        played.step(after_s=1.0)
        armed(played, first, second, last=Refused("refused_busy", "rank 2 is being captured"))
    capture = played.capture(asked)
    detail = "not armed in 3 tries: gpu-2: rank 2 is being captured"
    assert (capture.outcome, capture.detail) == ("failed", detail)


def test_a_place_that_is_lost_is_left_out_and_named(played):
    asked, first, second = played.ask()
    first.answers(ready(1))
    second.answers(ConnectionError("ConnectError"))
    played.step()
    assert (second.lost, second.requests) == ("ConnectError", ["prepare"])
    first.answers()
    first.set_all("exported")
    second.set_all("missing", "ConnectError")
    capture = played.finished(asked)
    assert capture.outcome == "partial"
    assert capture.detail == "rank 2: ConnectError; rank 3: ConnectError"


def test_without_any_place_nothing_is_begun(played):
    asked, first, second = played.ask()
    for one in (first, second):
        one.answers(TimeoutError("no answer"))
    played.step()
    capture = played.capture(asked)
    assert (capture.outcome, capture.detail) == ("failed", "gpu-1: no answer; gpu-2: no answer")


def test_stacks_need_no_step_and_supersede_what_waits_for_one(played):
    waiting, *before = played.ask()
    armed(played, *before)
    _, first, second = played.ask(STACKS)
    assert all(one.requests[-1] == "cancel superseded by stacks of a hang" for one in before)
    assert first.requests == ["arm 1: None"]
    first.answers()
    # One that refuses stacks is left out; the others go on.
    second.answers(Refused("refused_no_rank", "gone"))
    played.step()
    assert (first.lost, second.lost) == ("", "gone")
    assert played.finished(waiting).outcome == "failed"


def test_a_fault_of_a_participant_ends_its_capture(played, monkeypatch):
    asked, first, _ = played.ask()
    monkeypatch.setattr(first, "advance", lambda at: 1 / 0)
    assert played.step() is False
    assert played.finished(asked).outcome == "failed"
