"""Laps: steps that are noted as a whole count as those of which each border is noted by itself."""

from __future__ import annotations

from typing import Any

import pytest

from tests.client.hooked import run_loops

pytestmark = pytest.mark.torch

# Loop and its steps.
STEPS = {
    "undisturbed": 12,
    "two_epochs": 24,
    "batches_of_other_kinds": 24,
    "batches_of_single_numbers": 12,
    "phases_of_the_programs_own": 36,
    "inside_of_a_phase": 24,
    "evaluations": 12,
    "a_second_backward_now_and_then": 12,
    "another_optimizer_now_and_then": 12,
    "a_closure_now_and_then": 13,
    "data_that_fail": 21,
    "a_backward_and_an_update_that_fail": 24,
    "saved_inside_of_backward": 12,
    "steps_of_the_programs_own_from_some_step_on": 24,
    "a_framework_that_takes_over": 32,
    "a_gpu_that_comes_into_use": 12,
    "a_log_that_somebody_else_has_taken": 12,
    "another_thread_compiles": 12,
}
OF_TRAINING_DATA = "evaluations_of_the_training_data"
OF_ANOTHER_THREAD = "batches_of_another_thread"
INTERRUPTED = "interrupted_at_any_line_of_a_lap"


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    others = (OF_TRAINING_DATA, OF_ANOTHER_THREAD, INTERRUPTED)
    return run_loops(tmp_path_factory.mktemp("laps"), *STEPS, *others)


@pytest.fixture(scope="module")
def told_without(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    return run_loops(tmp_path_factory.mktemp("without"), *STEPS, OF_TRAINING_DATA, WITHOUT_LAPS="1")


@pytest.mark.parametrize(("name", "steps"), STEPS.items())
def test_laps_add_up_to_what_borders_noted_by_themselves_do(
    told: dict[str, dict[str, Any]],
    told_without: dict[str, dict[str, Any]],
    name: str,
    steps: int,
) -> None:
    laps, without = told[name].pop("result"), told_without[name].pop("result")
    assert told[name] == told_without[name]
    assert without == 0
    assert laps > 0
    assert told[name]["steps"] == steps


def test_training_data_that_are_evaluated_are_no_forward(
    told: dict[str, dict[str, Any]], told_without: dict[str, dict[str, Any]]
) -> None:
    laps, without = told[OF_TRAINING_DATA], told_without[OF_TRAINING_DATA]
    assert laps.pop("result") > without.pop("result")
    # The lap that had fetched the first of them looked at the clock once more.
    assert laps["phases_s"].pop("eval") == pytest.approx(without["phases_s"].pop("eval") + 0.001)
    assert laps == without


def test_a_batch_that_another_thread_fetches_is_part_of_no_lap(
    told: dict[str, dict[str, Any]],
) -> None:
    loop = told[OF_ANOTHER_THREAD]
    assert loop["result"] == 0
    assert loop["steps"] == 12
    assert "data_wait" not in loop["phases_s"]


def test_an_interrupt_at_any_line_of_a_lap_costs_no_later_step(
    told: dict[str, dict[str, Any]],
) -> None:
    counted = told[INTERRUPTED]["result"]
    assert len(counted) > 20
    assert set(counted) == {12}
