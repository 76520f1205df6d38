"""The phases of a loop that knows nothing of them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.client.hooked import run_loops

pytestmark = pytest.mark.torch

# As in loop_base.py, which only its own process may import: it installs the hooks.
SLEEP_S = 0.02
LOOPS = (
    "phases",
    "evaluation",
    "evaluation_without_gradients_inside_only",
    "checkpoint",
    "the_users_phases_are_innermost",
    "two_networks_on_one_batch",
    "a_class_that_is_pickled_by_its_content",
)


@pytest.fixture(scope="module")
def reported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    return run_loops(tmp_path_factory.mktemp("loops"), *LOOPS)


def test_waiting_forward_backward_and_optimizer_are_distinguished(reported: dict[str, Any]) -> None:
    phases_s = reported["phases"]["phases_s"]
    assert sorted(phases_s) == ["backward", "data_wait", "forward", "optimizer"]
    # Four batches in two steps. What runs between backward and the next batch is none of them.
    for name, times in (("data_wait", 4), ("forward", 4), ("backward", 4), ("optimizer", 2)):
        assert phases_s[name] >= times * SLEEP_S
    assert reported["phases"]["other_s"] >= 4 * SLEEP_S


def test_an_evaluation_is_one_phase_until_it_ends_or_training_goes_on(
    reported: dict[str, Any],
) -> None:
    found = reported["evaluation"]
    assert found["steps"] == 2
    # Two batches of four slow items, a sleep after each; then half of it, and a sleep.
    assert found["phases_s"]["eval"] >= (4 + 2 + 2 + 1) * SLEEP_S
    # The sleep after the end of the data, and nothing is waited for.
    assert found["other_s"] >= SLEEP_S
    assert "data_wait" not in found["phases_s"]
    assert found["samples"] == 0


def test_batches_that_train_nothing_are_an_evaluation_too(reported: dict[str, Any]) -> None:
    found = reported["evaluation_without_gradients_inside_only"]
    assert (found["steps"], found["samples"]) == (6, 24)
    # Of ten batches the first two could have been for training.
    assert found["phases_s"]["eval"] >= 8 * 0.005


def test_saving_is_the_phase_checkpoint(reported: dict[str, Any]) -> None:
    assert reported["checkpoint"]["phases_s"]["checkpoint"] > 0


def test_the_users_own_phases_stay_innermost(reported: dict[str, Any]) -> None:
    phases_s = reported["the_users_phases_are_innermost"]["phases_s"]
    assert phases_s["augment"] >= 2 * SLEEP_S
    assert phases_s["forward"] < phases_s["augment"]
    assert phases_s["update"] > 0


def test_another_backward_on_the_same_batch_has_a_forward_too(reported: dict[str, Any]) -> None:
    found = reported["two_networks_on_one_batch"]
    assert found["steps"] == 6
    # Of the first batch it was not known yet that data are loaded.
    assert found["phases_s"]["forward"] >= (5 + 4) * SLEEP_S
    # What follows the last optimizer's step is none.
    assert found["other_s"] >= 5 * SLEEP_S


def test_the_class_of_a_called_model_can_be_pickled_with_its_content(
    reported: dict[str, Any],
) -> None:
    assert reported["a_class_that_is_pickled_by_its_content"]["result"] == [[]]
