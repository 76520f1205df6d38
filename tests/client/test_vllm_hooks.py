"""The parts of a server's hooks that need no server: hooks around calls, and when they start."""

import sys
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from tests.cases import cases
from warpwatch import faults
from warpwatch.hooks import serving, vllm
from warpwatch.hooks.serving import ServerProcess
from warpwatch.iterations import IterationClock
from warpwatch.monitor import Monitor
from warpwatch.steps import StepClock

CASES = cases(__file__)


def test_a_hook_that_fails_costs_its_phase_alone_and_a_call_that_fails_its_iteration(monkeypatch):
    def fail(*_: Any) -> None:
        raise ZeroDivisionError

    process, before = ServerProcess(), faults.count()
    process.clock = clock = IterationClock()
    process.monitor = Monitor(clock)
    process.lead()
    assert (clock.serving.exact, clock.waits, process.leads) == (True, False, True)
    process.begin(True)
    assert (clock.open, clock.after_idle, clock.tokens) == (True, True, 0)
    seen: list[Any] = []
    for first in (lambda _: False, fail, lambda _: None):
        call = process.around(
            abs, before=first, phase=f"part_{len(seen)}", after=lambda *all_: seen.append(all_)
        )
        assert call(-3) == 3
    assert process.around(abs, after=fail)(-3) == 3
    assert (clock.phase_names, faults.count() - before) == (["part_2"], 2)
    assert seen == [(3, -3)] * 3
    with pytest.raises(ZeroDivisionError):
        process.around(fail)()
    assert not clock.open
    clock.capturing = True
    marks = Mock(side_effect=nullcontext)
    profiler = SimpleNamespace(record_function=marks)
    monkeypatch.setitem(sys.modules, "torch.autograd.profiler", profiler)
    with process.phase("forward"):
        assert clock.phase_names == ["part_2", "forward"]
    marks.assert_called_once_with("forward")
    process.begin(False)
    assert clock.serving._idle_since_ns is None
    process.rest()
    assert not clock.open and clock.serving._idle_since_ns


def test_a_program_that_trains_is_no_process_of_a_server(monkeypatch):
    for clock in (StepClock(), IterationClock()):
        attach = Mock(return_value=Monitor(clock))
        monkeypatch.setattr(serving, "attach", attach)
        process, serves = ServerProcess(), isinstance(clock, IterationClock)
        process.note("slow")
        process.note("late")
        joined = process.join("frontend", {"rank": 1, "parallel": {"pipeline": [1, 2]}})
        assert (joined is not None, process.is_separate) == (serves, serves)
        assert process.counts_tokens is not serves
        assert process.join("rank", {}) is joined
    place = {"rank": 1, "parallel": {"pipeline": [1, 2]}, "role": "frontend", "server": ""}
    attach.assert_called_once_with(None, "serve", {**place, "job": "", "note": "slow; late"})


def test_a_scheduler_whose_base_class_was_one_is_wrapped_once():
    names = ("schedule", "update_from_output", "has_unfinished_requests")
    base: Any = type("Base", (), dict.fromkeys(names, lambda self: None))
    derived: Any = type("Derived", (base,), {})
    for kind in (base, derived, base):
        vllm._hook_scheduler_class(kind)
        assert kind.schedule.__wrapped__ is kind.has_unfinished_requests


@pytest.mark.parametrize(("environ", "starts"), CASES["starts"].values(), ids=CASES["starts"])
def test_the_hooks_of_a_server_start_once_unless_they_are_off(monkeypatch, environ, starts):
    for name in ("WARPWATCH", "WARPWATCH_HOOKS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    process = ServerProcess()
    assert [process.starts("vllm"), process.starts("vllm")] == starts
