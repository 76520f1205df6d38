"""``--baseline``: what changed since the job was well, by phase and by kernel."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.diagnosis.captures import diagnosed, kernel, loading, stepped, written
from tests.diagnosis.faults import job
from tests.diagnosis.traces import TraceFile, cpu_rank
from tests.diagnosis.workloads import simulate
from warpwatch_diagnosis.comparison.before_after import BaselineComparison
from warpwatch_diagnosis.diagnosis import diagnose
from warpwatch_diagnosis.verdict.conclusion import Diagnosis


def busy_trace(
    *, factor: float = 1.0, loading_us: int = 0, extra: str | None = None, count: int = 10
) -> TraceFile:
    """Four steps: ``count`` products and ten pointwise kernels back to back, ``factor`` slower."""
    parts, at = [loading(loading_us)] if loading_us else [], float(loading_us)
    for name in ["gemm"] * count + ["elementwise"] * 10 + ([extra] if extra else []):
        us = factor * (500 if name == "gemm" else 100)
        parts.append(kernel(at, us, max(0, at - 50), name))
        at += us
    return stepped(*parts)


def compared(tmp_path: Path, now: TraceFile, before: TraceFile) -> Diagnosis:
    return diagnosed(tmp_path, now, baseline=written(tmp_path, before, name="before"))


def one(found: Diagnosis) -> BaselineComparison:
    assert len(found.comparison) == 1
    return found.comparison[0]


def test_phases_are_disjoint_and_add_up_to_the_step(tmp_path):
    comparison = one(compared(tmp_path, busy_trace(loading_us=3000), busy_trace()))
    assert comparison.now_step_ms == pytest.approx(10)
    assert sum(p.now_ms for p in comparison.phases) == pytest.approx(10)
    assert sum(p.before_ms for p in comparison.phases) == pytest.approx(10)
    loading = next(p for p in comparison.phases if p.phase == "idle: data_loading")
    assert loading.change_ms == pytest.approx(3)
    assert "idle time (data loading): 0.0 ms -> 3.0 ms (+3.0 ms)" in comparison.sentences


def test_kernels_that_are_new_or_gone_or_run_more_often_are_reported(tmp_path):
    now, before = busy_trace(extra="triton_poi_fused", count=12), busy_trace(extra="old_kernel")
    kernels = {k.name: k for k in one(compared(tmp_path, now, before)).kernels}
    assert kernels["triton_poi_fused"].change == "new"
    assert (kernels["gemm"].change, kernels["gemm"].now_count) == ("more", 12)
    assert kernels["elementwise"].change == "same"
    gone = kernels["old_kernel"]
    assert (gone.change, gone.before_ms, gone.now_ms) == ("gone", 0.1, 0)


def test_kernels_that_are_all_slower_alike_are_lower_clocks(tmp_path):
    comparison = one(compared(tmp_path, busy_trace(factor=1.2), busy_trace()))
    assert comparison.slowdown_ratio == pytest.approx(1.2)
    assert comparison.sentences[-1] == (
        "the same kernels are all 20 % slower, as with lower clocks"
    )


def test_one_slower_kernel_is_not_lower_clocks(tmp_path):
    now = busy_trace()
    for event in now.events:
        if event["name"] == "gemm":
            event["dur"] *= 1.3
    comparison = one(compared(tmp_path, now, busy_trace(factor=1.0, count=2)))
    assert comparison.slowdown_ratio is None or comparison.slowdown_ratio == pytest.approx(1.3)
    assert one(compared(tmp_path, busy_trace(), busy_trace())).slowdown_ratio is None


def test_a_slower_step_without_finding_is_not_healthy(simulations, tmp_path):
    # One rank.
    well = job("healthy", 4)
    slow = replace(well, machines=[replace(m, speed=m.speed / 1.3) for m in well.machines])
    now = simulate(slow, tmp_path, 4)
    assert diagnose(now).verdict == "healthy"
    found = diagnose(now, baseline=simulations.paths("healthy", 4))
    assert (found.verdict, found.findings) == ("inconclusive", ())
    assert "as with lower clocks" in found.summary


def test_ranks_are_compared_with_themselves(tmp_path):
    before = written(tmp_path, cpu_rank(1), cpu_rank(0), name="before")
    now = (cpu_rank(k, host_us=1000 * k) for k in (0, 1))
    found = diagnosed(tmp_path, *now, baseline=before)
    assert [c.rank for c in found.comparison] == [0, 1]
    changes = {p.phase: p.change_ms for p in found.comparison[1].phases if p.change_ms}
    assert changes == pytest.approx({"host": 1.0, "operators": -1.0})


def test_a_cpu_trace_and_a_gpu_trace_are_not_compared(tmp_path):
    assert compared(tmp_path, busy_trace(), cpu_rank(0)).comparison == ()


def test_without_a_gpu_the_operators_that_changed_are_named(tmp_path):
    now = cpu_rank(0)
    for begin in now.each_step():
        now.operator(begin + 1000, 4000, name="aten::sort")
    comparison = one(compared(tmp_path, now, cpu_rank(0)))
    sort = next(change for change in comparison.operators if change.name == "aten::sort")
    assert (sort.before_ms, sort.now_ms, sort.change_ms) == (0.0, 4.0, 4.0)
    assert "operator aten::sort: 0.00 ms -> 4.00 ms a step" in comparison.sentences
    assert comparison.kernels == ()
