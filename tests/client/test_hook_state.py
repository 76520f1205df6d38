"""The state that all hooks share; errors of the shim's own are counted, logged once and caught."""

from functools import partial
from threading import Thread
from typing import Any

import pytest

from tests.manual_clock import ManualClock
from warpwatch import faults
from warpwatch.hooks.hook_state import HookState
from warpwatch.monitor import Monitor
from warpwatch.ring import DURATION, SAMPLES, TOKENS
from warpwatch.steps import StepClock


def test_each_kind_of_error_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG", "warpwatch")
    for text in ("one kind", "another kind", "one kind"):
        faults.swallow(ValueError(text))
        faults.log_pending()
    heads = [record.getMessage().partition("\n")[0] for record in caplog.records]
    known = ["internal error: ValueError: one kind", "internal error: ValueError: another kind"]
    assert [head for head in heads if head.endswith("kind")] == known


@pytest.mark.parametrize("compiles_first", [True, False])
def test_what_fails_when_torch_compile_is_first_used_is_caught(compiles_first: bool) -> None:
    def fail() -> None:
        raise ZeroDivisionError("a mistake of the shim")

    state = HookState()
    state.compiles = compiles_first
    before = faults.count()
    state.when_compiling(fail)
    state.compile()
    assert faults.count() == before + 1


def test_each_training_of_a_framework_starts_anew(clock: ManualClock) -> None:
    state = HookState()
    state.monitor = monitor = Monitor(StepClock())
    state.backwards = 1
    counted: list[Any] = []
    for tokens in (70, 80):
        # Earlier samples and time belong to no step.
        state.samples = state.tokens = 9
        state.begin_training("transformers")
        assert (state.evaluating, monitor.step_clock) == (False, "transformers")
        for _ in range(2):
            clock.advance(0.1)
            state.samples += 4
            state.set_tokens("transformers", tokens)
            # A weaker source ends nothing, nor does another thread.
            state.end_step("optimizer")
            thread = Thread(target=partial(state.end_step, "transformers"))
            thread.start()
            thread.join()
            state.end_step("transformers")
        state.end_training("lightning")
        state.end_training("transformers")
        assert (state.evaluating, monitor.step_clock) == (None, "")
        clock.advance(5)
        totals = monitor.clock.totals
        counted.append([round(totals[DURATION] / 1e8), totals[SAMPLES], totals[TOKENS]])
    assert counted == [[2, 8, 140], [4, 16, 300]]
    assert (monitor.clock.steps, monitor.clock.steps_elsewhere) == (4, 4)
    state.drop()
    assert (state.attach(), state.off) == (None, True)


def test_what_waits_for_a_backward_is_called_at_that_one_or_the_next_free() -> None:
    state, called = HookState(), list[int]()
    for number in (3, 2, 2):
        state.when_backward(number, partial(called.append, number))
    for state.backwards in range(1, 7):
        if state.backwards == state.next_awaited:
            state.act_at_backward()
            called.append(-state.backwards)
    assert (called, state.next_awaited) == ([2, -2, 3, -3, 2, -4], 0)
