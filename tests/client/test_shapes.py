"""The shapes of public training programs, plain and under ``run``: nothing is changed, each step is
counted, and nearly all of it has a name.
"""

from importlib.util import find_spec
from typing import NamedTuple

import pytest

from tests.client.fork_server import Loops

pytestmark = pytest.mark.torch

# The least share of the time with a name: many of the few steps are first ones, with fewer names.
NAMED = 0.8
LEARNING = {"forward", "backward", "optimizer"}
LOADED = LEARNING | {"data_wait"}


class Shape(NamedTuple):
    """``unseen``: steps at the begin that are not counted. ``samples``: None where no rows are."""

    phases: set[str]
    samples: int | None = 0
    tokens: int = 0
    clock: str = "optimizer"
    unseen: int = 0
    parallel: dict[str, list[int]] = {}  # noqa: RUF012


# One process each. With a loader a step is 128 rows unless the shape differs.
ALONE = {
    # Both once the model's calls are watched, after five backwards of 8 rows.
    "nanogpt": Shape(LEARNING | {"eval"}, (4 * 12 - 5) * 8, (4 * 12 - 5) * 8 * 32),
    # It is watched from the first backward on.
    "nanogpt_compiled": Shape(LEARNING | {"eval"}, (4 * 12 - 1) * 8, (4 * 12 - 1) * 8 * 32),
    # A row of its batches is a position, not a sequence; 64 backwards show that nothing else steps.
    "updates_by_hand": Shape(
        {"forward", "backward", "eval"}, 0, (85 - 64) * 32 * 16, "backward", unseen=64
    ),
    "ppo": Shape(LEARNING | {"rollout"}),
    "dqn": Shape(LEARNING),
    "td3": Shape(LEARNING),
    "gan": Shape(LOADED, 20 * 128),
    "optimizers_in_turn": Shape(LOADED, 30 * 128),
    "optimizers_after_one_another": Shape(LEARNING),
    "folds": Shape(LOADED | {"eval"}, 3 * 8 * 128),
    "accumulated_gradients": Shape(LOADED, 40 * 128),
    # Sequences, of 20 to 49 tokens.
    "packing": Shape(LOADED, 96, sum(20 + number % 30 for number in range(96))),
    "vae": Shape(LOADED | {"eval"}, 30 * 128),
    "mingpt": Shape(LOADED | {"eval"}, 24 * 8, 24 * 8 * 32),
    "engine": Shape(LOADED, 40 * 128),
    "notebook": Shape(LOADED | {"eval"}, 30 * 128),
}
RANKS = {
    "ddp_accumulation": Shape(LOADED | {"comm"}, 40 * 128),
    "fsdp2": Shape(LOADED | {"comm"}, 20 * 128),
    "tensor_parallel": Shape(LEARNING | {"comm"}, parallel={"tensor": [0, 2]}),
    "pipeline_parallel": Shape(LEARNING | {"comm"}, parallel={"pipeline": [1, 2]}),
    "torchtitan": Shape(LEARNING | {"comm"}, parallel={"data": [0, 2], "tensor": [0, 2]}),
}
# Loop: package, shape. A framework that has ended its training is not the clock any more.
FRAMEWORKS = {
    # The tokens are those of the prompts: its own texts are not data.
    "generation": ("transformers", Shape(LOADED | {"h2d", "rollout"}, 80, 80 * 4, clock="")),
    "fabric": ("lightning", Shape(LOADED, 40 * 128)),
    "megatron": (
        "megatron",
        Shape(LOADED | {"comm"}, 30 * 128, parallel={"data": [1, 2], "tensor": [1, 2]}),
    ),
    "deepspeed": (
        "deepspeed",
        Shape(LOADED | {"comm"}, 80 * 128, 0, "deepspeed", 0, {"data": [1, 2], "pipeline": [1, 2]}),
    ),
}
SHAPES = {**ALONE, **RANKS, **{name: shape for name, (_, shape) in FRAMEWORKS.items()}}


def check(name: str, plain: Loops, observed: Loops) -> None:
    losses, found, shape = plain[name]["result"], observed[name], SHAPES[name]
    assert "steps" not in plain[name]
    assert len(set(losses)) > len(losses) / 2
    assert found["result"] == losses
    assert (found["clock"], found["steps"]) == (shape.clock, len(losses) - shape.unseen)
    assert {phase for phase, spent_s in found["phases_s"].items() if spent_s} == shape.phases
    # By the CPU time of the program, in which its neighbours on the machine have no part.
    named_s = sum(found["phases_s"].values())
    assert named_s >= NAMED * (named_s + found["other_s"]), found
    assert found["tokens"] == shape.tokens
    assert shape.samples in (None, found["samples"])
    split = {kind: place for kind, place in found["parallel"].items() if place[1] > 1}
    assert split == shape.parallel


@pytest.mark.parametrize("name", ALONE)
def test_a_programs_steps_and_phases_are_seen(plain_and_observed, name):
    check(name, *plain_and_observed)


@pytest.mark.loops
@pytest.mark.parametrize("name", [*RANKS, *FRAMEWORKS])
def test_so_are_ranks_and_frameworks(plain_and_observed, name):
    package = FRAMEWORKS[name][0] if name in FRAMEWORKS else "torch"
    if find_spec(package) is None:
        pytest.skip(f"needs the package {package}")
    check(name, *plain_and_observed)


# Loop and its steps. Where a compiled optimizer's gradients are dropped before they are made, what
# ends a step is the begin of the next.
STEPS = {
    "compiled_after_the_optimizer": 5,
    "compiled_before_the_optimizer": 5,
    "a_compiled_optimizer_zeroed_first": 9,
    "a_compiled_optimizer_zeroed_last": 10,
    "a_zero_grad_of_the_programs_own": 10,
    "a_compiled_step_with_all_in_it": 10,
    "a_compiled_step_without_a_loader": 10,
    "a_compiled_function_that_loads_and_saves": 10,
}
AFTER = "compiled_after_it_was_seen"


@pytest.mark.parametrize(("name", "steps"), STEPS.items())
def test_compiled_steps_are_counted(plain_and_observed, name, steps):
    plain, hooked = (loops[name] for loops in plain_and_observed)
    assert (hooked["clock"], hooked["steps"]) == ("optimizer", steps)
    assert "clock" not in plain
    (losses, graphs), (plain_losses, plain_graphs) = hooked["result"], plain["result"]
    assert losses == plain_losses
    # Graphs and operators in them, then graph breaks.
    assert graphs[:2] == plain_graphs[:2]


@pytest.mark.parametrize("name", [name for name in STEPS if "_step_" in name])
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
