"""Simulated training with a known fault in it: the diagnosis names the fault, and the rank."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.diagnosis.faults import JOBS, job
from tests.diagnosis.generator import COMPUTE, QUEUE_LIMIT, Machine, Program, Rank, run
from tests.diagnosis.workloads import simulate
from warpwatch_diagnosis.diagnosis import diagnose

SEEDS = range(2)
# What the evidence says of a rank that holds up the others.
REASONS = {
    "straggler_clocks": "slower than on rank",
    "straggler_work": "it has more work than rank",
    "straggler_host": "the difference is the host's own work",
    "straggler_loader": "keeps the others waiting",
}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", JOBS)
def test_the_fault_its_rank_and_its_reason_are_named(name: str, seed: int, tmp_path: Path) -> None:
    known = job(name, seed)
    found = diagnose(simulate(known, tmp_path, seed))
    assert found.verdict == known.cause, found.summary
    if known.rank is not None:
        assert found.findings[0].rank == known.rank
    assert REASONS.get(name, "") in " ".join(found.findings[0].evidence if found.findings else [])


@pytest.mark.parametrize("seed", range(100, 106))
def test_what_is_well_gets_no_finding_at_all(seed: int, tmp_path: Path) -> None:
    found = diagnose(simulate(job("healthy", seed), tmp_path, seed))
    assert (found.verdict, found.findings) == ("healthy", ())


@pytest.mark.parametrize("seed", [500, 502, 504])
def test_slow_loading_is_not_healthy_where_no_step_is_annotated(seed: int, tmp_path: Path) -> None:
    paths = simulate(job("data_loading", seed), tmp_path, seed)
    for path in paths:
        trace = json.loads(path.read_text())
        kept = [e for e in trace["traceEvents"] if not e["name"].startswith("ProfilerStep")]
        path.write_text(json.dumps(trace | {"traceEvents": kept}))
    found = diagnose(paths)
    assert found.verdict in ("data_loading", "inconclusive")
    assert "batch" in found.summary


# --- the generator's physics ----------------------------------------------------------------

QUIET = Machine(kernel_noise=0.0, host_noise=0.0)


def alone(machine: Machine = QUIET) -> Rank:
    rank = Rank(0, 1, machine, Random(0))
    rank.recording = True
    return rank


def events(rank: Rank, cat: str) -> list[dict[str, Any]]:
    return [event for event in rank.events if event["cat"] == cat]


def test_kernels_of_a_stream_run_one_after_the_other() -> None:
    rank = alone()
    for _ in range(3):
        rank.launch("k", 100.0)
    kernels = events(rank, "kernel")
    gaps = [b["ts"] - a["ts"] - a["dur"] for a, b in pairwise(kernels)]
    assert gaps == pytest.approx([1.2, 1.2])


def test_a_full_queue_blocks_the_host_until_work_begins() -> None:
    rank = alone()
    for _ in range(QUEUE_LIMIT + 2):
        rank.launch("k", 100.0)
    calls = events(rank, "cuda_runtime")
    assert calls[QUEUE_LIMIT - 1]["dur"] == pytest.approx(5.0)
    assert rank.now_us > rank.free_us[COMPUTE] - (QUEUE_LIMIT + 1) * 101.2
    slow = alone(Machine(launch_us=200.0, kernel_noise=0.0, host_noise=0.0))
    for _ in range(QUEUE_LIMIT + 2):
        slow.launch("k", 100.0)
    assert max(call["dur"] for call in events(slow, "cuda_runtime")) == pytest.approx(200.0)


def test_reading_a_value_waits_for_the_device() -> None:
    rank = alone()
    rank.launch("k", 1000.0)
    rank.item()
    assert rank.now_us > 1000.0
    assert [event["name"] for event in events(rank, "gpu_memcpy")] == [
        "Memcpy DtoH (Device -> Pageable)"
    ]


def test_a_collective_ends_on_all_ranks_when_the_last_has_come() -> None:
    ranks = [Rank(k, 2, QUIET, Random(k)) for k in range(2)]

    def program(rank: Rank) -> Program:
        rank.recording = True
        rank.spend(1000.0 * rank.rank)
        yield from rank.all_reduce(1 << 20, 300.0, None)

    run(ranks, program)
    first, last = (events(rank, "kernel")[0] for rank in ranks)
    assert first["ts"] + first["dur"] == pytest.approx(last["ts"] + last["dur"])
    assert last["dur"] == pytest.approx(300.0)
    assert first["dur"] == pytest.approx(1300.0)


def test_ranks_with_different_collectives_are_no_simulation() -> None:
    def program(rank: Rank) -> Program:
        for _ in range(rank.rank):
            yield from rank.all_reduce(1 << 20, 300.0, None)

    with pytest.raises(AssertionError, match="ranks differ"):
        run([Rank(k, 2, QUIET, Random(k)) for k in range(2)], program)
