"""The programs of examples/ as they are: what they report, with our code in them and without."""

from __future__ import annotations

from importlib.util import find_spec
from typing import NamedTuple

import pytest

from tests.client.daemon_side import ROOT, Folder, Ring
from tests.client.integrations.programs import report


class Expected(NamedTuple):
    script: str
    package: str
    step_clock: str
    steps: int
    samples: int
    tokens: int
    phases: set[str]


TRAINED = {"data_wait", "forward", "backward", "optimizer"}
PLAIN = Expected("plain_pytorch", "torch", "step()", 40, 320, 10240, TRAINED)
# Two batches a step.
FRAMEWORKS = [
    Expected("huggingface_trainer", "transformers", "transformers", 20, 160, 5120,
        TRAINED | {"h2d", "eval", "checkpoint"}),
    Expected("lightning_fit", "lightning", "lightning", 20, 320, 0,
        TRAINED | {"h2d", "eval", "checkpoint"}),
    Expected("accelerate_loop", "accelerate", "accelerate", 20, 320, 10240,
        TRAINED | {"h2d", "checkpoint"}),
]  # fmt: skip


def check(folder: Folder, example: Expected, *arguments: str, run: bool) -> None:
    if find_spec(example.package) is None:
        pytest.skip(f"needs the package {example.package}")
    script = ROOT / "examples" / f"{example.script}.py"
    trainings = len(arguments)
    steps = trainings * example.steps

    def reported(ring: Ring) -> bool:
        known = example.phases <= set(ring.metadata["phases"]) and ring.metadata["step_clock"]
        # The helper thread settles the last steps.
        return bool(known) and ring.header.totals.steps >= steps

    ring = report(folder, script, *arguments, run=run, reported=reported)
    totals = ring.header.totals
    expected = (steps, trainings * example.samples, trainings * example.tokens)
    assert (totals.steps, totals.samples, totals.tokens) == expected
    assert (ring.metadata["step_clock"], ring.metadata["faults"]) == (example.step_clock, 0)
    spent_ns = dict(zip(ring.metadata["phases"], totals.phases_ns, strict=False))
    assert {phase for phase, ns in spent_ns.items() if ns > 0} == example.phases
    assert sum(spent_ns.values()) <= totals.duration_ns


@pytest.mark.torch
def test_an_example_reports_what_it_trains(folder: Folder) -> None:
    check(folder, PLAIN, "", run=False)


@pytest.mark.loops
@pytest.mark.torch
@pytest.mark.parametrize("example", FRAMEWORKS, ids=lambda example: example.script)
def test_an_example_of_a_framework_reports_what_it_trains(
    folder: Folder, example: Expected
) -> None:
    """Callbacks without hooks, as in test_frameworks.py."""
    check(folder, example, "", run=False)


@pytest.mark.torch
@pytest.mark.parametrize("example", FRAMEWORKS, ids=lambda example: example.script)
def test_without_our_code_it_reports_the_same_and_with_both_no_more(
    folder: Folder, example: Expected
) -> None:
    check(folder, example, "--plain", "", run=True)
