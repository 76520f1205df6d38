"""The parts of vLLM's hooks that need no server: places, work, and when they start."""

from typing import Any

import pytest

from tests.cases import cases
from warpwatch import faults
from warpwatch.hooks import vllm
from warpwatch.hooks.serving import ServerProcess
from warpwatch.iterations import IterationClock
from warpwatch.monitor import Monitor, Phase

CASES = cases(__file__)


def test_a_hook_that_fails_costs_its_phase_alone_and_a_call_that_fails_its_iteration():
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
    assert not isinstance(process.phase("forward"), Phase)
    process.begin(False)
    process.rest()
    assert not clock.open


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
