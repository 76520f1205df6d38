"""The phases of a loop without a DataLoader: calls of its model say what begins."""

from __future__ import annotations

from typing import Any

import pytest

from tests.client.hooked import run_loops

pytestmark = pytest.mark.torch

# As in loop_base.py, which only its own process may import: it installs the hooks.
SLEEP_S = 0.02
LOOPS = (
    "batches_without_a_loader",
    "batches_without_a_loader_unwatched",
    "a_teacher_at_each_step",
    "a_policy_that_acts",
    "compiled_after_it_was_seen",
)


@pytest.fixture(scope="module")
def reported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    return run_loops(tmp_path_factory.mktemp("loops"), *LOOPS)


def test_forward_and_evaluation_are_seen_by_the_models_calls(reported: dict[str, Any]) -> None:
    found = reported["batches_without_a_loader"]
    assert (found["clock"], found["steps"]) == ("optimizer", 8)
    # Of sixteen calls eleven are after five backwards; of fourteen without gradients four may be a
    # teacher's.
    assert found["phases_s"]["forward"] >= 11 * SLEEP_S
    assert found["phases_s"]["eval"] >= 10 * SLEEP_S
    assert found["tokens"] == 32 * found["samples"] / 4 == 32 * 11


def test_no_loss_changes(reported: dict[str, Any]) -> None:
    losses = reported["batches_without_a_loader"]["result"]
    assert len(losses) == 16
    assert losses == reported["batches_without_a_loader_unwatched"]["result"]


def test_a_teacher_is_part_of_forward(reported: dict[str, Any]) -> None:
    phases_s = reported["a_teacher_at_each_step"]["phases_s"]
    assert phases_s["forward"] >= 3 * 2 * SLEEP_S
    assert "eval" not in phases_s


def test_acting_in_an_environment_is_rollout(reported: dict[str, Any]) -> None:
    found = reported["a_policy_that_acts"]
    assert found["steps"] == 12
    # In the third round, after twelve backwards, from its third turn on: both modules and a sleep.
    assert found["phases_s"]["rollout"] >= 6 * 3 * SLEEP_S
    assert found["phases_s"]["forward"] >= 7 * 2 * SLEEP_S


def test_a_class_can_be_pickled_with_its_content(reported: dict[str, Any]) -> None:
    assert reported["a_policy_that_acts"]["result"] == [[]]


def test_a_compiled_model_is_seen_outside_of_its_graph(reported: dict[str, Any]) -> None:
    found = reported["compiled_after_it_was_seen"]
    hooked, eager_s, still_hooked = found["result"]
    assert (hooked, still_hooked) == (True, False)
    assert found["phases_s"]["forward"] > eager_s > 0
