"""Tests of the steps, data and phases counted in loops without our code.

A step of the training is one, however it calls its optimizers.
"""

import pytest

from tests.cases import cases
from tests.client.fork_server import ForkServer, Loops

CASES = cases(__file__)

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def reported(with_hooks: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Loops:
    return Loops(with_hooks, tmp_path_factory.mktemp("loops"))


@pytest.mark.parametrize(("name", "expected"), CASES["loops"].items())
def test_steps_data_and_phases_of_a_loop(reported, name, expected):
    found = reported[name]
    *counted, phases = expected
    assert [found[key] for key in ("clock", "steps", "samples", "tokens")] == counted
    spent = {**found["phases_s"], "other": found["other_s"]}
    assert spent.keys() - {"other"} == set(phases)
    parts = {phase: round(seconds) for phase, seconds in spent.items() if round(seconds)}
    assert parts == CASES["parts"].get(name, {})


def test_the_parameters_of_one_model_are_known(reported):
    one = {"parameters": 9}
    known = {name: reported[name]["model"] for name in ("plain", "phases_of_one_optimizer_each")}
    assert known == {"plain": one, "phases_of_one_optimizer_each": one}


@pytest.mark.parametrize(("name", "result"), CASES["results"].items())
def test_a_loop_has_its_result(reported, name, result):
    assert reported[name]["result"] == result


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


@pytest.mark.parametrize(
    ("chosen", "expected"),
    # Loading data alone makes no rank.
    [("optimizer, backward, ", [5, 0, "backward", "optimizer"]), ("dataloader", [None, None])],
)
def test_parts_can_be_switched_off(with_torch, tmp_path, chosen, expected):
    """The hooks come after torch here."""
    reported = Loops(with_torch, tmp_path, WARPWATCH_HOOKS=chosen)["plain"]
    counted = [reported.get("steps"), reported.get("samples")]
    assert [*counted, *sorted(reported.get("phases_s", ()))] == expected
