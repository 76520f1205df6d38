"""Real traces with one injected fault each, or none, get the right verdict.

The fixtures are recorded by ``recorded_faults.py`` with torch 2.13 on the CPU, ``--reduced 2`` and,
where loops are the fault, ``--scale 0.1``; those in ``pairs`` with ``--pairs --reduced 3``, those
in ``ranks`` with ``--ranks --reduced 4``. dynamo does not compile LSTMs, which so have no
recompilation.
"""

from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import mean

import pytest

from tests.cases import cases
from warpwatch_diagnosis.diagnosis import Diagnosis, conclude, diagnose
from warpwatch_diagnosis.findings import RequestingAnomaly
from warpwatch_diagnosis.intervals import total
from warpwatch_diagnosis.measures.measures import measure
from warpwatch_diagnosis.report.text import render_text
from warpwatch_diagnosis.trace.reader import Trace, read_trace, without_collection

CASES = cases(__file__)

FIXTURES = Path(__file__).with_name("fixtures")
DOCS = Path(__file__).parents[2] / "docs" / "diagnosis.md"
# Without stacks no event shows a collection, and a rollout is the host's work without any fault.
OTHERS = {"plain/garbage_collection": "host_bound", "plain/healthy-policy": "host_bound"}
TRACES = sorted(
    path for path in FIXTURES.glob("*/*.gz") if path.parent.name not in ("ranks", "servers")
)
PAIRS = [path for path in TRACES if "-without" in path.name]
# Predicted by measured saving; other work on the machine moves single pairs by more.
TOLERANCE, CLOSE_PAIRS, CLOSE_QUIET_PAIRS = 0.25, 12, 15


def expected(path: Path) -> str:
    name = f"{path.parent.name}/{path.name.partition('.')[0]}"
    if name.endswith("-without"):
        return "healthy"
    other = next((kind for known, kind in OTHERS.items() if name.startswith(known)), None)
    return other or CASES["expected"][path.name.partition("-")[0]]


@cache
def read(path: Path) -> Trace:
    return read_trace(path)


@cache
def diagnosed(path: Path) -> Diagnosis:
    with without_collection():
        return conclude([measure(read(path))])


def judge(found: dict[Path, Diagnosis], least: float) -> None:
    """How many must be right; no fault is called healthy, and none of the wrong ones is sure."""
    headed = [d for d in found.values() if d.verdict not in ("healthy", "inconclusive")]
    assert all(d.findings[0].kind == d.verdict for d in headed)
    wrong = {path: d for path, d in found.items() if d.verdict != expected(path)}
    assert len(wrong) <= (1 - least) * len(found), {p.name: d.verdict for p, d in wrong.items()}
    assert [p.name for p, d in wrong.items() if d.verdict == "healthy"] == []
    assert [p.name for p, d in wrong.items() if d.findings[0].confidence == "high"] == []


def test_verdicts_are_right_and_the_document_has_them() -> None:
    found = {path: diagnosed(path) for path in TRACES}
    assert len(found) >= 60
    judge(found, least=0.92)
    said = Counter((expected(path), d.verdict) for path, d in found.items())
    kinds = sorted({kind for pair in said for kind in pair})
    rows = [
        f"| `{truth}` | {' | '.join(str(said[truth, kind] or '') for kind in kinds)} |"
        for truth in kinds
    ]
    assert "\n".join(rows) in DOCS.read_text(), "\n".join(rows)


def test_a_single_step_has_nearly_the_same_verdicts() -> None:
    judge({path: conclude([measure(first_step(read(path)))]) for path in TRACES}, least=0.92)


def first_step(trace: Trace) -> Trace:
    annotations = trace.events["annotation"]
    steps = sorted(e[1:3] for e in annotations if e.name.startswith("ProfilerStep#"))
    low, high = steps[0]
    events = trace.events.items()
    cut = {kind: [e for e in kept if low <= e.begin_us < high] for kind, kept in events}
    return replace(trace, events=cut)


def step_us(path: Path) -> float:
    return mean(end - begin for begin, end in diagnosed(path).measures[0].steps)


def operators_us(path: Path) -> float:
    cpu = diagnosed(path).measures[0].cpu
    return total(cpu.operators) / diagnosed(path).measures[0].step_count if cpu else 0.0


def test_a_predicted_saving_is_that_of_the_program_without_its_fault() -> None:
    errors, quiet = {}, {}
    for without in PAIRS:
        path = without.with_name(without.name.replace("-without", ""))
        finding, measures = diagnosed(path).findings[0], diagnosed(path).measures[0]
        predicted_us = finding.recoverable_s * 1e6 / measures.step_count
        errors[path.name] = predicted_us / (step_us(path) - step_us(without)) - 1
        # The difference of the same operators, which the fault does not touch, is noise.
        noise_us = operators_us(path) - operators_us(without)
        quiet[path.name] = predicted_us / (step_us(path) - step_us(without) - noise_us) - 1
    assert len([e for e in errors.values() if abs(e) <= TOLERANCE]) >= CLOSE_PAIRS, errors
    assert len([e for e in quiet.values() if abs(e) <= TOLERANCE]) >= CLOSE_QUIET_PAIRS, quiet


@pytest.mark.parametrize("model", ["perceptron", "transformer", "policy"])
def test_a_fault_is_named_with_its_line_and_what_to_do(model, golden_case):
    paths = [path for path in TRACES if f"-{model}" in path.name and path not in PAIRS]
    assert len(paths) >= 2
    golden_case("\n".join(f"# {path.name}\n{render_text(diagnosed(path))}" for path in paths))


CULPRIT = 1
RANKS = {
    "healthy": ("healthy", None),
    "more_work": ("straggler", CULPRIT),
    "shared_core": ("straggler", CULPRIT),
    "slow_network": ("communication_bound", None),
}


@pytest.mark.parametrize("model", ["perceptron", "convolutional"])
@pytest.mark.parametrize("fault", RANKS)
def test_the_fault_of_two_ranks_is_named_and_the_rank_that_has_it(fault, model, golden_text):
    paths = sorted((FIXTURES / "ranks").glob(f"{fault}-{model}.rank*"))
    found = diagnose(paths)
    golden_text(found)
    verdict, culprit = RANKS[fault]
    assert (len(paths), found.verdict) == (2, verdict), found.summary
    if culprit is None:
        return
    alone = found.findings[0]
    finding = diagnose(paths, anomaly=RequestingAnomaly("straggler", rank=CULPRIT)).findings[0]
    assert (alone.rank, finding.kind, finding.rank) == (culprit, "straggler", culprit)
    if fault == "shared_core":
        assert (alone.confidence, finding.confidence) == ("low", "medium")
