"""Calls that do not return cost their thread and nothing else."""

import threading

import pytest

from tests.devices.hand_loops import HandLoops
from tests.manual_clock import ManualClock
from tests.waiting import DEADLINE_S, eventually
from warpwatch_runtime.call_guard import CallGuard, GuardedLoop, run_all


def test_a_loop_whose_call_hangs_is_begun_again_as_often_as_it_may() -> None:
    clock, returns = ManualClock(), threading.Event()
    loops, rounds = HandLoops(clock), list[str]()

    def step(guard: CallGuard) -> None:
        guard.call("disk", returns.wait, DEADLINE_S)
        rounds.append("the call has returned")

    loop = GuardedLoop(loops, "guarded", 0.01, step, 1, clock.monotonic)
    for _ in range(2):
        assert loop.begin() and loop.begin()
        loops["guarded"].start()
        eventually(lambda: loop.guard.in_flight)
        clock.advance(59.9)
        assert loop.give_up_if_stuck(60.0) is None
        clock.advance(0.1)
        assert loop.give_up_if_stuck(60.0) == "disk"
        assert loop.give_up_if_stuck(60.0) is None
    assert not loop.begin()
    assert loop.hanging == ("disk", "disk")
    returns.set()
    loops.join()
    assert not loop.in_flight
    # An abandoned thread does nothing more.
    assert rounds == []


def test_closing_says_whether_a_call_may_still_use_what_is_freed() -> None:
    clock, returns = ManualClock(), threading.Event()
    loops = HandLoops(clock)
    loop = GuardedLoop(loops, "guarded", 0.01, lambda guard: guard.call(1, returns.wait), 1)
    loop.begin()
    loops["guarded"].start()
    eventually(lambda: loop.guard.in_flight)
    assert not loop.close(0.01)
    assert not loop.begin()
    returns.set()
    loops.join()
    assert loop.close(0.0)


def test_what_never_returns_holds_up_no_other_work_and_not_for_longer_than_is_waited() -> None:
    names: list[str] = []
    returns, all_noted = threading.Event(), threading.Event()

    def note() -> None:
        names.append(threading.current_thread().name)
        if len(names) == 2:
            all_noted.set()

    run_all({"hung": returns.wait, "a": note, "b": note}, 0.0)
    assert all_noted.wait(DEADLINE_S)
    assert sorted(names) == ["ww-a", "ww-b"]
    returns.set()
    run_all({"c": note})
    assert names[-1] == "ww-c"
    with pytest.raises(ValueError, match="65 threads, at most 64"):
        run_all({str(number): note for number in range(65)})
