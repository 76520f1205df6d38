"""Tests of the steps, data and phases counted in loops without our code.

A step of the training is one, however it calls its optimizers.
"""

import pytest

from tests.client.fork_server import ForkServer, Loops

pytestmark = pytest.mark.torch

STEPS = {"backward", "optimizer"}
CALLED = STEPS | {"forward"}
LOADED = CALLED | {"data_wait"}

# Loop: step clock, steps, samples, tokens, phases.
Counted = tuple[str, int, int, int, set[str]]
LOOPS: dict[str, Counted] = {
    "plain": ("optimizer", 5, 20, 0, LOADED),
    "two_networks": ("optimizer", 5, 0, 0, CALLED),
    "closures": ("optimizer", 5, 0, 0, CALLED),
    "closures_called_often": ("optimizer", 3, 0, 0, CALLED),
    "sub_groups": ("optimizer", 5, 0, 0, STEPS),
    "skipped_by_the_scaler": ("optimizer", 6, 0, 0, CALLED),
    "a_scaler_that_is_switched_off": ("optimizer", 6, 0, 0, CALLED),
    "inside_of_backward": ("optimizer", 5, 0, 0, STEPS),
    "without_backward": ("optimizer", 5, 0, 0, {"optimizer"}),
    "gradients_that_no_backward_made": ("optimizer", 11, 0, 0, STEPS),
    # The step that raised does not count.
    "an_optimizer_that_raises": ("optimizer", 4, 0, 0, STEPS),
    "an_optimizer_that_is_replaced_after_its_first_step_failed": ("optimizer", 5, 0, 0, CALLED),
    "an_optimizer_that_is_replaced_after_a_later_step_failed": ("optimizer", 10, 0, 0, CALLED),
    "a_gpu_that_comes_into_use": ("optimizer", 10, 40, 0, LOADED),
    "two_trainings_of_a_framework": ("", 6, 0, 0, {"pause"}),
    "a_clock_that_is_gone": ("optimizer", 6, 0, 0, CALLED),
    # Fifteen of the second are waited for.
    "a_clock_that_stands_still": ("optimizer", 1 + 20 - 15 + 1, 0, 0, STEPS),
    "phases_of_one_optimizer_each": ("optimizer", 200, 0, 0, STEPS),
    "phases_that_come_back": ("optimizer", 60, 0, 0, STEPS),
    "phases_of_two_optimizers_each": ("optimizer", 40, 0, 0, STEPS),
    # The inner loop of the first step was all that there was.
    "a_new_optimizer_for_each_inner_loop": ("optimizer", 5 + 20, 0, 0, STEPS),
    # The first step of the generator counts in the place of the critic's next.
    "a_critic_that_steps_five_times": ("optimizer", 50, 0, 0, STEPS),
    "a_generator_before_its_critics_five_steps": ("optimizer", 10, 0, 0, STEPS),
    "a_clock_that_steps_no_more_after_many_turns": ("optimizer", 50 + 30 - 15 + 1, 0, 0, STEPS),
    "a_clock_that_steps_no_more_and_slow_steps": ("optimizer", 5 + 10 - 3 + 1, 0, 0, STEPS),
    "two_networks_on_one_batch": ("optimizer", 6, 24, 0, LOADED),
    "another_threads_optimizer": ("optimizer", 5, 0, 0, STEPS),
    # The step in which the last thread becomes the training thread is not counted.
    "threads_that_train_at_once": ("optimizer", 3 + 5 + 2 + 20 - 1, 0, 0, CALLED),
    "more_backwards_in_a_step_than_show_a_clock": ("optimizer", 2, 0, 0, CALLED),
    # By hand until then: 64 backwards show that nothing else ends a step.
    # The first with the optimizer ended with its backward, too.
    "backwards_alone_until_an_optimizer_comes": ("optimizer", 20 + 1 + 10, 0, 0, CALLED),
    "as_fastai_does": ("optimizer", 5, 20, 0, LOADED),
    "as_keras_does": ("optimizer", 5, 20, 0, LOADED),
    "as_pyro_does": ("optimizer", 5, 0, 0, CALLED),
    "by_distributed_autograd": ("optimizer", 5, 0, 0, STEPS),
    "hooks_that_an_old_dynamo_took_away": ("optimizer", 5, 0, 0, STEPS),
    "phases": ("optimizer", 3, 8, 0, LOADED),
    "evaluation": ("optimizer", 2, 0, 0, STEPS | {"eval"}),
    "evaluation_without_gradients_inside_only": ("optimizer", 6, 24, 0, LOADED | {"eval"}),
    "checkpoint": ("optimizer", 3, 0, 0, STEPS | {"checkpoint"}),
    "the_users_phases_are_innermost": ("optimizer", 3, 8, 0, LOADED | {"augment", "update"}),
    "a_class_that_is_pickled_by_its_content": ("optimizer", 6, 4, 32, CALLED),
    # 85 batches, of which 64 show that no optimizer steps; then 10 with one.
    "last_resort": ("dataloader", 21, 84, 0, LOADED - {"optimizer"}),
    "last_resort_until_an_optimizer_comes": ("optimizer", 31, 124, 0, LOADED),
    # Ten times 20 batches are not too many.
    "accumulation_of_more_and_more_batches": ("optimizer", 3, 1480, 0, LOADED),
    "tokens": ("optimizer", 4, 12, 120, LOADED),
    "one_batch_ahead": ("optimizer", 8, 32, 0, LOADED),
    "the_users_own_numbers": ("step()", 5, 5000, 0, LOADED),
    "a_dataset_that_loads_itself": ("optimizer", 2, 2, 0, LOADED),
    "training_data_that_is_evaluated": ("optimizer", 9, 36, 0, LOADED | {"eval"}),
    "time_first": ("optimizer", 6, 44, 44 * 7, LOADED),
    "the_first_batch_is_looked_at": ("optimizer", 12, 48, 0, LOADED),
    "data_that_fails": ("optimizer", 15, 60, 0, LOADED),
    # The first one came before there was a training thread.
    "batches_that_another_thread_fetches": ("optimizer", 12, 4, 0, STEPS),
}
# Parts that a loop spends, by phase.
PARTS = {
    "a_clock_that_steps_no_more_and_slow_steps": {"other": 110},
    # Before the first backward there was no rank.
    "two_networks_on_one_batch": {"forward": 5 + 5, "other": 5},
    "closures": {"forward": 5, "optimizer": 2 * 5, "other": 4},
    # The first step begins with its backward.
    "as_pyro_does": {"forward": 4, "optimizer": 5, "other": 4},
    # Four batches in two steps. Time between backward and the next batch is not a phase.
    "phases": {"data_wait": 4, "forward": 4, "backward": 4, "optimizer": 2, "other": 4},
    # Two batches of four slow items, a part after each; then half of it, and a part. What follows
    # the end of the data is no phase.
    "evaluation": {"eval": (4 + 2) + (2 + 1), "other": 1},
    # The first two of ten batches could have been for training.
    "evaluation_without_gradients_inside_only": {"eval": 8, "forward": 2},
    "the_users_phases_are_innermost": {"augment": 2},
    "training_data_that_is_evaluated": {"eval": 2},
}


@pytest.fixture(scope="module")
def reported(with_hooks: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Loops:
    return Loops(with_hooks, tmp_path_factory.mktemp("loops"))


@pytest.mark.parametrize(("name", "expected"), LOOPS.items())
def test_steps_data_and_phases_of_a_loop(reported, name, expected):
    found = reported[name]
    *counted, phases = expected
    assert [found[key] for key in ("clock", "steps", "samples", "tokens")] == counted
    spent = {**found["phases_s"], "other": found["other_s"]}
    assert spent.keys() - {"other"} == phases
    parts = {phase: round(seconds) for phase, seconds in spent.items() if round(seconds)}
    assert parts == PARTS.get(name, {})


def test_the_parameters_of_one_model_are_known(reported):
    one = {"parameters": 9}
    known = {name: reported[name]["model"] for name in ("plain", "phases_of_one_optimizer_each")}
    assert known == {"plain": one, "phases_of_one_optimizer_each": one}
    # Weights of one shape may be copies of a model.
    assert reported["two_networks"]["model"] == {}


def test_steps_that_other_threads_take_at_the_same_time_are_reported(reported):
    assert reported["threads_that_train_at_once"]["result"] == 4 + 7


def test_the_scaler_did_skip_two_of_the_six_steps(reported):
    assert reported["skipped_by_the_scaler"]["result"] == 4


def test_an_interrupt_at_any_line_of_a_hook_costs_no_later_step(reported):
    counted = reported["interrupted_at_any_line"]["result"]
    assert len(counted) > 20
    assert set(counted) == {2}


def test_steps_are_timed_on_a_gpu_once_it_is_in_use(reported):
    phases_s = reported["a_gpu_that_comes_into_use"]["phases_s"]
    # The fifth step is the first one on it, and has no end before it there.
    assert 5 * 0.03 <= phases_s["forward"] < 6 * 0.03
    assert 5 * 0.06 <= phases_s["backward"] < 6 * 0.06


def test_a_process_that_only_loads_and_evaluates_is_no_rank(reported):
    assert reported["only_evaluating"]["result"] is True
    assert "clock" not in reported["only_evaluating"]


def test_the_class_of_a_called_model_can_be_pickled_with_its_content(reported):
    assert reported["a_class_that_is_pickled_by_its_content"]["result"] == [[]]


@pytest.mark.parametrize(
    ("chosen", "expected"),
    # Loading data alone makes no rank.
    [("optimizer,backward", [5, 0, "backward", "optimizer"]), ("dataloader", [None, None])],
)
def test_parts_can_be_switched_off(with_torch, tmp_path, chosen, expected):
    """The hooks come after torch here."""
    reported = Loops(with_torch, tmp_path, WARPWATCH_HOOKS=chosen)["plain"]
    counted = [reported.get("steps"), reported.get("samples")]
    assert [*counted, *sorted(reported.get("phases_s", ()))] == expected
