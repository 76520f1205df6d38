"""Real traces with one injected fault each get the right verdict.

The fixtures are recorded by ``recorded_faults.py`` with torch 2.13 on the CPU, ``--reduced 2`` and,
where loops are the fault, ``--scale 0.1``.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from warpwatch_diagnosis.diagnosis import diagnose
from warpwatch_diagnosis.rules.base import Finding

FIXTURES = Path(__file__).with_name("fixtures")
MODELS = ("perceptron", "convolutional", "transformer")
VERDICTS = {
    "plain/healthy": "healthy",
    "plain/no_workers": "data_loading",
    "plain/slow_collate": "data_loading",
    "plain/tiny_operators": "host_bound",
    "plain/item": "sync_bound",
    # Without stacks no event shows what the host did.
    "plain/garbage_collection": "host_bound",
    "plain/checkpoint": "checkpoint",
    "plain/recompilation": "recompilation",
    "plain/graph_breaks": "recompilation",
    "stacks/healthy": "healthy",
    "stacks/item": "sync_bound",
    "stacks/garbage_collection": "gc_pause",
    "stacks/checkpoint": "checkpoint",
}
TRACES = sorted(
    str(path.relative_to(FIXTURES)).partition(".")[0] for path in FIXTURES.glob("*/*.gz")
)


def worst(name: str, model: str) -> Finding:
    return diagnose([FIXTURES / f"{name}-{model}.pt.trace.json.gz"]).findings[0]


def test_there_are_traces_of_each_fault_and_model() -> None:
    assert len(TRACES) == 35
    assert set(TRACES) >= {
        f"{name}-{model}" for name in VERDICTS if "plain" in name for model in MODELS
    }


@pytest.mark.parametrize("trace", TRACES)
def test_an_injected_fault_is_named(trace: str) -> None:
    found = diagnose([FIXTURES / f"{trace}.pt.trace.json.gz"])
    assert found.verdict == VERDICTS[trace.partition("-")[0]]
    assert bool(found.findings) == (found.verdict != "healthy")


def test_a_collection_is_named_with_the_line_that_asks_for_it() -> None:
    finding = worst("stacks/garbage_collection", "transformer")
    assert finding.evidence[1].startswith("<built-in function collect>: 2 times, ")
    assert "recorded_faults.py(" in finding.evidence[2]
    assert "): step" in finding.evidence[2]
    assert finding.advice.startswith("Take gc.collect() out of the step; call gc.freeze()")


def test_a_checkpoint_is_named_with_its_line_and_how_often_it_may_be_written() -> None:
    finding = worst("stacks/checkpoint", "perceptron")
    assert "serialization.py" in finding.evidence[1]
    assert finding.evidence[2].startswith("2 of 2 captured steps save; saving every ")
    assert "): _save" in finding.evidence[3]
    assert "async_save" in finding.advice


def test_a_checkpoint_without_stacks_is_seen_by_its_state_dict() -> None:
    finding = worst("plain/checkpoint", "perceptron")
    assert finding.evidence[1].startswith("gaps right after aten::detach of every parameter")
    assert finding.confidence == "medium"


def test_a_loop_over_values_is_named_with_its_line() -> None:
    finding = worst("stacks/item", "convolutional")
    assert finding.evidence[2].startswith("aten::_local_scalar_dense at recorded_faults.py(")
    assert "): _read ran 1," in finding.evidence[2]


def test_a_recompilation_says_which_compilation_did_not_fit() -> None:
    finding = worst("plain/recompilation", "perceptron")
    assert "torch.compile compiles" in finding.evidence[0]
    assert "in 2 of 2 steps" in finding.evidence[1]
    assert finding.evidence[2].startswith("2 compiled regions in use")
    assert "mark_dynamic" in finding.advice
