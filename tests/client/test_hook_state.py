"""What the hooks know together, without torch."""

from __future__ import annotations

import pytest

from warpwatch import faults
from warpwatch.hooks.hook_state import HookState


@pytest.mark.parametrize("compiles_first", [True, False])
def test_what_fails_when_torch_compile_comes_into_use_costs_the_program_nothing(
    compiles_first: bool,
) -> None:
    def fail() -> None:
        raise ZeroDivisionError("a mistake of the shim")

    state = HookState()
    state.compiles = compiles_first
    before = faults.count()
    state.when_compiling(fail)
    state.compile()
    assert faults.count() == before + 1
