"""Rounds of a loop: their times, their failures, and a round that does not return."""

import logging
import threading
from collections.abc import Callable

import pytest

from tests.manual_clock import ManualClock
from tests.waiting import DEADLINE_S, eventually
from warpwatch_runtime.supervisor import Loop, Supervisor


class ByHand:
    """A supervisor whose loops wait for no time; after ``rounds`` waits, for their end."""

    def __init__(self, rounds: int) -> None:
        self.clock = ManualClock()
        self.supervisor = Supervisor(self.clock.monotonic, self._wait)
        self._rounds = rounds
        self._done = threading.Event()

    def _wait(self, event: threading.Event, seconds: float) -> bool:
        self.clock.sleep(seconds)
        if len(self.clock.slept) < self._rounds:
            return False
        self._done.set()
        return event.wait()

    def run(self, interval_s: float, step: Callable[[], None]) -> Loop:
        loop = self.supervisor.every("work", interval_s, step)
        assert self._done.wait(DEADLINE_S)
        return loop


@pytest.fixture
def supervisor():
    supervisor = Supervisor()
    yield supervisor
    supervisor.stop(DEADLINE_S)


def test_rounds_begin_an_interval_apart_and_a_late_one_is_not_made_up_for():
    by_hand, taken_s = ByHand(4), iter([0.25, 0.25, 2.5, 0.5])
    loop = by_hand.run(1.0, lambda: by_hand.clock.advance(next(taken_s)))
    assert by_hand.clock.slept == [0.75, 0.75, 0.0, 0.5]
    assert by_hand.supervisor.durations_s() == {"work": 0.5}
    assert loop.busy_s == 0.0
    by_hand.supervisor.stop(DEADLINE_S)
    assert not loop.alive
    assert by_hand.supervisor.durations_s() == {}


def test_a_failing_loop_goes_on_is_counted_and_logged_once_in_a_minute(caplog):
    def fail():
        raise ValueError("broken")

    by_hand = ByHand(8)
    with caplog.at_level(logging.ERROR):
        loop = by_hand.run(10.0, fail)
    assert (loop.failures, loop.runs) == (8, 8)
    assert caplog.messages == ["loop work failed: ValueError: broken"] * 2
    assert all(record.exc_info for record in caplog.records)
    by_hand.supervisor.stop(DEADLINE_S)


def test_a_round_that_does_not_return_is_seen_and_holds_up_neither_others_nor_the_end():
    entered, release, ran = threading.Event(), threading.Event(), threading.Event()

    def hang():
        entered.set()
        release.wait()

    clock = ManualClock()
    supervisor = Supervisor(clock.monotonic)
    loop = supervisor.every("stuck", 0.01, hang)
    assert entered.wait(DEADLINE_S)
    supervisor.every("other", 3600.0, ran.set)
    assert ran.wait(DEADLINE_S)
    clock.advance(7.0)
    assert loop.busy_s == 7.0
    supervisor.stop(timeout_s=0.01)
    assert loop.alive
    release.set()
    loop.stop(DEADLINE_S)


def test_wake_runs_the_next_round_now_and_the_one_after_an_interval_later():
    clock, waits, waiting = ManualClock(), list[tuple[bool, float]](), threading.Semaphore(0)

    def wait(event: threading.Event, seconds: float) -> bool:
        waits.append((event.is_set(), seconds))
        waiting.release()
        return event.wait()

    supervisor = Supervisor(clock.monotonic, wait)
    loop = supervisor.every("slow", 3600.0, lambda: None)
    for runs in range(1, 4):
        assert waiting.acquire(timeout=DEADLINE_S)
        assert (loop.runs, waits) == (runs, [(False, 3600.0)] * runs)
        clock.advance(1000.0)
        loop.wake()
    supervisor.stop(DEADLINE_S)


def test_failures_of_loops_that_ended_still_count(supervisor):
    failed = threading.Semaphore(0)

    def fail():
        failed.release()
        raise ValueError("always")

    for _ in range(3):
        loop = supervisor.every("same", 3600.0, fail)
        assert failed.acquire(timeout=DEADLINE_S)
        loop.stop(DEADLINE_S)
    loop = supervisor.every("same", 3600.0, fail)
    supervisor.every("other", 3600.0, lambda: None)
    eventually(lambda: loop.failures)
    assert supervisor.failures() == {"same": 4, "other": 0}
    assert [one.name for one in supervisor.loops] == ["same", "other"]
