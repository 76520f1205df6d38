"""Errors of the shim's own: counted, logged once each, and caught."""

import pytest

from warpwatch import faults
from warpwatch.hooks.hook_state import HookState


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
