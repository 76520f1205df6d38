"""The optimizer as step clock: one step of the training is one, however it calls its optimizers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.client.hooked import run_loops

pytestmark = pytest.mark.torch

# Loop and its steps.
STEPS = {
    "plain": 5,
    "two_networks": 5,
    "accumulation": 3,
    "closures": 5,
    "closures_called_often": 3,
    "sub_groups": 5,
    "skipped_by_the_scaler": 6,
    "a_scaler_that_is_switched_off": 5,
    "inside_of_backward": 5,
    "without_backward": 5,
    # The one that raised is none.
    "an_optimizer_that_raises": 4,
    "an_optimizer_that_is_replaced_after_its_first_step_failed": 5,
    "an_optimizer_that_is_replaced_after_a_later_step_failed": 10,
    "gradients_that_no_backward_made": 11,
    "closures_that_are_none": 5,
    "a_clock_that_is_gone": 6,
    # Fifteen of the second are waited for.
    "a_clock_that_stands_still": 1 + 20 - 15 + 1,
    "phases_of_one_optimizer_each": 200,
    "phases_that_come_back": 60,
    "phases_of_two_optimizers_each": 40,
    # The inner loop of the first step was all that there was.
    "a_new_optimizer_for_each_inner_loop": 5 + 20,
    # The first step of the generator counts in the place of the critic's next.
    "a_critic_that_steps_five_times": 50,
    "a_generator_before_its_critics_five_steps": 10,
    "a_clock_that_steps_no_more_after_many_turns": 50 + 30 - 15 + 1,
    "a_clock_that_steps_no_more_and_slow_steps": 5 + 10 - 3 + 1,
    "another_threads_optimizer": 5,
    "more_backwards_in_a_step_than_show_a_clock": 2,
    # By hand until then: 64 backwards show that nothing else ends a step.
    # The first with the optimizer ended with its backward, too.
    "backwards_alone_until_an_optimizer_comes": 20 + 1 + 10,
    "hooks_that_an_old_dynamo_took_away": 5,
}


BACKWARDS = "backwards_alone"
GPU = "a_gpu_that_comes_into_use"


@pytest.fixture(scope="module")
def reported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("loops")
    others = "only_evaluating", "interrupted_at_any_line", "two_trainings_of_a_framework"
    return run_loops(folder, *STEPS, *others, GPU, BACKWARDS)


@pytest.mark.parametrize(("name", "steps"), STEPS.items())
def test_each_step_of_the_training_counts_once(
    reported: dict[str, dict[str, Any]], name: str, steps: int
) -> None:
    assert (reported[name]["clock"], reported[name]["steps"]) == ("optimizer", steps)


def test_the_parameters_of_one_model_are_known(reported: dict[str, dict[str, Any]]) -> None:
    one = reported["plain"]["model"]["parameters"]
    assert one > 0
    # Of one shape: they may be copies of a model.
    assert reported["two_networks"]["model"] == {}
    # One after the other.
    assert reported["phases_of_one_optimizer_each"]["model"] == {"parameters": one}
    assert reported[BACKWARDS]["model"] == {}


def test_without_optimizer_and_loader_each_backward_is_a_step(
    reported: dict[str, dict[str, Any]],
) -> None:
    assert (reported[BACKWARDS]["clock"], reported[BACKWARDS]["steps"]) == ("backward", 20)


def test_an_optimizers_step_is_a_phase_unless_all_runs_inside_of_it(
    reported: dict[str, dict[str, Any]],
) -> None:
    with_phase = {name for name in STEPS if "optimizer" in reported[name]["phases_s"]}
    assert with_phase == STEPS.keys() - {"closures", "closures_called_often"}


def test_the_scaler_did_skip_two_of_the_six_steps(reported: dict[str, dict[str, Any]]) -> None:
    assert reported["skipped_by_the_scaler"]["result"] == 4


def test_an_interrupt_at_any_line_of_a_hook_costs_no_later_step(
    reported: dict[str, dict[str, Any]],
) -> None:
    counted = reported["interrupted_at_any_line"]["result"]
    assert len(counted) > 20
    assert set(counted) == {2}


def test_steps_are_timed_on_a_gpu_once_it_is_in_use(reported: dict[str, dict[str, Any]]) -> None:
    found = reported[GPU]
    assert (found["steps"], found["samples"]) == (10, 40)
    # The fifth step is the first one on it, and has no end before it there.
    assert 5 * 0.03 <= found["phases_s"]["forward"] < 6 * 0.03
    assert 5 * 0.06 <= found["phases_s"]["backward"] < 6 * 0.06


def test_the_pause_between_two_trainings_belongs_to_no_step(
    reported: dict[str, dict[str, Any]],
) -> None:
    found = reported["two_trainings_of_a_framework"]
    assert (found["steps"], found["phases_s"]["pause"]) == (6, 0)


def test_a_process_that_only_loads_and_evaluates_is_no_rank(
    reported: dict[str, dict[str, Any]],
) -> None:
    assert reported["only_evaluating"]["result"] is True
    assert "clock" not in reported["only_evaluating"]


@pytest.mark.parametrize(
    ("chosen", "steps", "samples", "phases"),
    [("optimizer,backward", 5, 0, ["backward", "optimizer"]), ("dataloader", None, None, [])],
)
def test_parts_can_be_switched_off(
    tmp_path: Path, chosen: str, steps: int | None, samples: int | None, phases: list[str]
) -> None:
    reported = run_loops(tmp_path, "plain", WARPWATCH_HOOKS=chosen)["plain"]
    # Loading data alone makes no rank.
    assert (reported.get("steps"), reported.get("samples")) == (steps, samples)
    assert sorted(reported.get("phases_s", ())) == phases
