"""A loop that fails goes on and is counted; one that hangs is seen and holds nobody up."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator

import pytest

from warpwatch_daemon.agent.supervisor import Supervisor


@pytest.fixture
def supervisor() -> Iterator[Supervisor]:
    supervisor = Supervisor()
    yield supervisor
    supervisor.stop()


def until(condition: threading.Event) -> None:
    assert condition.wait(5)


def test_a_failing_loop_is_counted_logged_once_and_goes_on(
    supervisor: Supervisor, caplog: pytest.LogCaptureFixture
) -> None:
    third = threading.Event()
    rounds = []

    def fail() -> None:
        rounds.append(1)
        if len(rounds) == 3:
            third.set()
        raise ValueError("broken")

    with caplog.at_level(logging.ERROR):
        loop = supervisor.every("bad", 0.001, fail)
        until(third)
        loop.stop(1)
    assert loop.failures >= 3
    assert [record.message for record in caplog.records] == ["loop bad failed: ValueError: broken"]


def test_a_round_that_does_not_return_is_seen_and_does_not_hold_up_the_end(
    supervisor: Supervisor,
) -> None:
    entered, release = threading.Event(), threading.Event()

    def hang() -> None:
        entered.set()
        release.wait()

    loop = supervisor.every("stuck", 0.01, hang)
    until(entered)
    time.sleep(0.05)
    assert loop.busy_s > 0
    began = time.monotonic()
    supervisor.stop(timeout_s=0.2)
    assert time.monotonic() - began < 2
    release.set()


def test_wake_runs_the_next_round_now(supervisor: Supervisor) -> None:
    rounds: list[float] = []
    ran = threading.Event()

    def note() -> None:
        rounds.append(time.monotonic())
        ran.set()

    loop = supervisor.every("slow", 3600, note)
    until(ran)
    ran.clear()
    loop.wake()
    until(ran)
    assert len(rounds) == 2


def test_failures_of_a_loop_that_ended_still_count() -> None:
    def fail() -> None:
        raise ValueError("always")

    supervisor = Supervisor()
    for _ in range(2):
        loop = supervisor.every("same", 60.0, fail)
        while not loop.runs:
            time.sleep(0.01)
        loop.stop(5.0)
    supervisor.every("other", 60.0, lambda: None)
    assert supervisor.failures() == {"same": 2, "other": 0}
    supervisor.stop()
