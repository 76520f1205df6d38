"""Simulated training with a known fault: the diagnosis names it, its rank, and what it costs."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.diagnosis.workloads import NAMES, Job, job, simulate
from warpwatch_diagnosis.measures.measures import measure
from warpwatch_diagnosis.trace.reader import read_trace


@pytest.mark.parametrize("name", NAMES)
def test_the_fault_its_rank_and_its_reason_are_named(name, simulations, golden_text):
    known, found = job(name, 1), simulations.diagnosis(name)
    assert found.verdict == known.cause, found.summary
    if known.rank is not None:
        assert found.findings[0].rank == known.rank
    golden_text(found)


def test_what_is_well_gets_no_finding_at_all(simulations):
    found = [simulations.diagnosis("healthy", seed) for seed in (1, 4, 100)]
    assert [(d.verdict, d.findings) for d in found] == [("healthy", ())] * 3


# --- what a replay without a fault saves is what a run without it takes less ----------------------

# The fault, and what takes it out of the program.
WITHOUT: dict[str, dict[str, Any]] = {
    "data_loading": {"loading_us": 0},
    "host_bound": {"python_us": 0},
    "sync_bound": {"item_each_layer": False, "metric_us": 0},
    "transfer_bound": {},
    "allocator_thrash": {"mallocs": 0},
    "gc_pause": {"named_us": 0},
    "checkpoint": {"named_us": 0, "saved_bytes": 0},
    "recompilation": {"named_us": 0},
}
TOLERANCE = 0.25


def cured(ill: Job) -> Job:
    well = replace(ill, usual=replace(ill.usual, **WITHOUT[ill.cause]))
    if ill.cause == "transfer_bound":
        well = replace(well, model=replace(well.model, batch_bytes=1024))
    return well


def whole_us(path: Path) -> float:
    """Until the last work is done: a host that is ahead ends its steps before."""
    trace = read_trace(path)
    low, high = measure(trace).window
    return max([high, *(e.end_us for e in trace.events["kernel"])]) - low


@pytest.mark.parametrize("fault", WITHOUT)
@pytest.mark.parametrize("seed", [1, 3])
def test_the_prediction_is_real(simulations, tmp_path, fault, seed):
    before = simulations.paths(fault, seed)
    after = simulate(cured(job(fault, seed)), tmp_path, seed)
    finding = simulations.diagnosis(fault, seed).findings[0]
    saved_s = (whole_us(before[0]) - whole_us(after[0])) / 1e6
    assert finding.kind == fault
    assert finding.recoverable_s == pytest.approx(saved_s, rel=TOLERANCE)
