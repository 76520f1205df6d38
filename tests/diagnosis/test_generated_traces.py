"""Simulated training with a known fault in it: the diagnosis names the fault, and the rank."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.diagnosis.conftest import Simulations
from tests.diagnosis.faults import NAMES, job
from warpwatch_diagnosis.diagnosis import diagnose

# What the evidence says of a rank that holds up the others.
REASONS = {
    "straggler_clocks": "slower than on rank",
    "straggler_work": "it has more work than rank",
    "straggler_host": "the difference is the host's own work",
    "straggler_loader": "keeps the others waiting",
}


@pytest.mark.parametrize("name", NAMES)
def test_the_fault_its_rank_and_its_reason_are_named(name: str, simulations: Simulations) -> None:
    known, found = job(name, 1), simulations.diagnosis(name)
    assert found.verdict == known.cause, found.summary
    if known.rank is not None:
        assert found.findings[0].rank == known.rank
    assert REASONS.get(name, "") in " ".join(found.findings[0].evidence if found.findings else [])


@pytest.mark.parametrize("seed", range(100, 103))
def test_what_is_well_gets_no_finding_at_all(seed: int, simulations: Simulations) -> None:
    found = simulations.diagnosis("healthy", seed)
    assert (found.verdict, found.findings) == ("healthy", ())


@pytest.mark.parametrize("seed", [1, 504])
def test_slow_loading_without_steps_is_not_healthy(
    seed: int, simulations: Simulations, tmp_path: Path
) -> None:
    without = []
    for path in simulations.paths("data_loading", seed):
        trace = json.loads(path.read_text())
        kept = [e for e in trace["traceEvents"] if not e["name"].startswith("ProfilerStep")]
        without.append(tmp_path / path.name)
        without[-1].write_text(json.dumps(trace | {"traceEvents": kept}))
    found = diagnose(without)
    assert found.verdict in ("data_loading", "inconclusive")
    assert "batch" in found.summary
