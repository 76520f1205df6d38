"""The shapes of public training programs, plain and under ``run``: nothing is changed, each step is
counted, and nearly all of it has a name.
"""

from importlib.util import find_spec

import pytest

from tests.cases import cases
from tests.client.fork_server import Loops

pytestmark = pytest.mark.torch

# The least share of the time with a name: many of the few steps are first ones, with fewer names.
NAMED = 0.8
LEARNING = {"forward", "backward", "optimizer"}
CASES = cases(__file__)
SHAPES = CASES["alone"] | CASES["ranks"] | CASES["frameworks"]


def check(name: str, plain: Loops, observed: Loops) -> None:
    losses, found = plain[name]["result"], observed[name]
    shape = CASES["usual"] | SHAPES[name]
    assert "steps" not in plain[name]
    assert len(set(losses)) > len(losses) / 2
    assert found["result"] == losses
    assert (found["clock"], found["steps"]) == (shape["clock"], len(losses) - shape["unseen"])
    phases = {phase for phase, spent_s in found["phases_s"].items() if spent_s}
    assert phases == set(shape["phases"].split())
    # By the CPU time of the program, in which its neighbours on the machine have no part.
    named_s = sum(found["phases_s"].values())
    assert named_s >= NAMED * (named_s + found["other_s"]), found
    assert (found["samples"], found["tokens"]) == (shape["samples"], shape["tokens"])
    split = {kind: place for kind, place in found["parallel"].items() if place[1] > 1}
    assert split == shape["parallel"]


@pytest.mark.parametrize("name", CASES["alone"])
def test_a_programs_steps_and_phases_are_seen(plain_and_observed, name):
    check(name, *plain_and_observed)


@pytest.mark.loops
@pytest.mark.parametrize("name", [*CASES["ranks"], *CASES["frameworks"]])
def test_so_are_ranks_and_frameworks(plain_and_observed, name):
    package = SHAPES[name].get("package", "torch")
    if find_spec(package) is None:
        pytest.skip(f"needs the package {package}")
    check(name, *plain_and_observed)


AFTER = "compiled_after_it_was_seen"


@pytest.mark.parametrize(("name", "steps"), CASES["compiled"].items())
def test_compiled_steps_are_counted(plain_and_observed, name, steps):
    plain, hooked = (loops[name] for loops in plain_and_observed)
    assert (hooked["clock"], hooked["steps"]) == ("optimizer", steps)
    assert "clock" not in plain
    (losses, graphs), (plain_losses, plain_graphs) = hooked["result"], plain["result"]
    assert losses == plain_losses
    # Graphs and operators in them, then graph breaks.
    assert graphs[:2] == plain_graphs[:2]


@pytest.mark.parametrize("name", [name for name in CASES["compiled"] if "_step_" in name])
def test_a_step_that_is_compiled_as_a_whole_has_names(plain_and_observed, name):
    found = plain_and_observed[1][name]
    named_s = sum(found["phases_s"].values())
    assert found["phases_s"].keys() >= LEARNING
    assert named_s >= NAMED * (named_s + found["other_s"]), found


def test_no_frame_of_ours_is_compiled(plain_and_observed):
    name = "a_compiled_function_that_loads_and_saves"
    frames = [reported[name]["result"][1][2]["total"] for reported in plain_and_observed]
    assert frames[1] <= frames[0]


def test_a_compiled_model_is_seen_outside_of_its_graph(plain_and_observed):
    found = plain_and_observed[1][AFTER]
    hooked, eager_s, still_hooked = found["result"]
    assert (hooked, still_hooked) == (True, False)
    assert found["phases_s"]["forward"] > eager_s > 0
