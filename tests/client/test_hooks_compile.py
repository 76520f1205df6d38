"""torch.compile under the hooks: the same graphs, breaks, compiled frames and losses; and steps."""

from __future__ import annotations

import pytest

from tests.client.fork_server import Loops

pytestmark = pytest.mark.torch

# Loop and its steps. Where a compiled optimizer's gradients are dropped before they are made, what
# ends a step is the begin of the next.
STEPS = {
    "compiled_after_the_optimizer": 5,
    "compiled_before_the_optimizer": 5,
    "a_compiled_optimizer_zeroed_first": 9,
    "a_compiled_optimizer_zeroed_last": 10,
    "a_zero_grad_of_the_programs_own": 10,
    "a_compiled_step_with_all_in_it": 10,
    "a_compiled_function_that_loads_and_saves": 10,
}
AFTER = "compiled_after_it_was_seen"


@pytest.mark.parametrize(("name", "steps"), STEPS.items())
def test_compiled_steps_are_counted(plain_and_observed: list[Loops], name: str, steps: int) -> None:
    plain, hooked = (loops[name] for loops in plain_and_observed)
    assert (hooked["clock"], hooked["steps"]) == ("optimizer", steps)
    assert "clock" not in plain
    (losses, graphs), (plain_losses, plain_graphs) = hooked["result"], plain["result"]
    assert losses == plain_losses
    # Graphs and operators in them, then graph breaks.
    assert graphs[:2] == plain_graphs[:2]


def test_no_frame_of_ours_is_compiled(plain_and_observed: list[Loops]) -> None:
    name = "a_compiled_function_that_loads_and_saves"
    frames = [reported[name]["result"][1][2]["total"] for reported in plain_and_observed]
    assert frames[1] <= frames[0]


def test_a_compiled_model_is_seen_outside_of_its_graph(plain_and_observed: list[Loops]) -> None:
    found = plain_and_observed[1][AFTER]
    hooked, eager_s, still_hooked = found["result"]
    assert (hooked, still_hooked) == (True, False)
    assert found["phases_s"]["forward"] > eager_s > 0
