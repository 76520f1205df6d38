"""Calls that do not return cost their thread and nothing else."""

from __future__ import annotations

import threading

from tests.devices.recording import wait_until
from warpwatch_daemon.agent.supervisor import Supervisor
from warpwatch_devices.call_guard import CallGuard, GuardedLoop, run_all


def test_a_loop_whose_call_hangs_is_begun_again_as_often_as_it_may() -> None:
    supervisor, returns = Supervisor(), threading.Event()
    rounds: list[str] = []

    def step(guard: CallGuard) -> None:
        guard.call("disk", returns.wait)
        rounds.append("the call has returned")

    loop = GuardedLoop(supervisor, "guarded", 0.01, step, limit=1)
    for _ in range(2):
        assert loop.begin()
        wait_until(lambda: loop.guard.in_flight)
        assert loop.give_up_if_stuck(60.0) is None
        assert loop.give_up_if_stuck(0.0) == "disk"
    assert not loop.begin()
    assert loop.hanging == ("disk", "disk")
    returns.set()
    wait_until(lambda: not loop.in_flight)
    supervisor.stop()
    # Who was given up does nothing more.
    assert rounds == []
    assert supervisor.failures() == {"guarded": 0}


def test_closing_says_whether_a_call_may_still_use_what_is_freed() -> None:
    supervisor, returns = Supervisor(), threading.Event()
    loop = GuardedLoop(supervisor, "guarded", 0.01, lambda guard: guard.call(1, returns.wait), 1)
    loop.begin()
    wait_until(lambda: loop.guard.in_flight)
    assert not loop.close(0.01)
    assert not loop.begin()
    returns.set()
    wait_until(lambda: not loop.in_flight)
    assert loop.close(0.0)


def test_what_never_returns_holds_up_no_other_work_and_not_for_longer_than_is_waited() -> None:
    names: list[str] = []
    returns = threading.Event()

    def note() -> None:
        names.append(threading.current_thread().name)

    run_all({"hung": returns.wait, "a": note, "b": note}, 0.2)
    assert sorted(names) == ["ww-a", "ww-b"]
    returns.set()
    run_all({"c": note})
    assert names[-1] == "ww-c"
