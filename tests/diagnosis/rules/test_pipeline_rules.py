"""Pipelines whose stages wait for each other: because there are few micro-batches, or unevenly."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.diagnosis.traces import STEP_US, TraceFile
from warpwatch_diagnosis.diagnosis import diagnose
from warpwatch_diagnosis.verdict.conclusion import Diagnosis
from warpwatch_diagnosis.verdict.corroboration import Asked


def stage_trace(stage: int, of: int, waits_us: int, on_gpu: bool, **place: object) -> TraceFile:
    """Steps that compute, and wait ``waits_us`` for what another stage hands over."""
    parallel = {"pipeline": [stage, of]} | place
    trace = TraceFile(warpwatch={"parallel": parallel})
    for begin in trace.each_step():
        if on_gpu:
            trace.kernel(begin + waits_us, STEP_US - waits_us, begin, "gemm")
            trace.kernel(begin, waits_us, begin - 20, "ncclDevKernel_SendRecv(ncclDevKernelArgs)")
        else:
            trace.operator(begin + waits_us, STEP_US - waits_us)
            trace.annotation("gloo:recv", begin, waits_us, tid=99)
    return trace


def diagnosed(folder: Path, waits_us: list[int], on_gpu: bool, **place: object) -> Diagnosis:
    stages = len(waits_us)
    traces = [stage_trace(n, stages, us, on_gpu, **place) for n, us in enumerate(waits_us)]
    return diagnose([t.write(folder / f"rank{n}.json") for n, t in enumerate(traces)])


@pytest.mark.parametrize("on_gpu", [True, False])
def test_waiting_of_the_busiest_stage_is_the_pipelines_bubble(tmp_path: Path, on_gpu: bool) -> None:
    found = diagnosed(tmp_path, [4000, 4000], on_gpu)
    assert found.verdict == "pipeline_bubble"
    assert [f.kind for f in found.findings] == ["pipeline_bubble"]
    assert found.findings[0].share == pytest.approx(0.4)
    assert found.findings[0].recoverable_s == pytest.approx(4 * 0.004 / 2)
    assert "micro-batches" in found.findings[0].advice
    # Two stages with one and a half micro-batches wait two fifths of the time.
    assert "about 1.5 micro-batches" in found.findings[0].evidence[1]


@pytest.mark.parametrize("on_gpu", [True, False])
def test_a_stage_that_computes_longer_than_the_mean_is_named_and_no_straggler(
    tmp_path: Path, on_gpu: bool
) -> None:
    found = diagnosed(tmp_path, [6000, 6000, 500, 6000], on_gpu)
    assert [(f.kind, f.rank) for f in found.findings] == [("stage_imbalance", 2)]
    finding = found.findings[0]
    assert finding.share == pytest.approx((9.5 - (3 * 4 + 9.5) / 4) / 10)
    assert "0: 4.0 ms, 1: 4.0 ms, 2: 9.5 ms, 3: 4.0 ms" in finding.evidence[1]


def test_who_was_late_before_the_capture_is_compared_with_its_own_stage(tmp_path: Path) -> None:
    # Ranks 0 and 1 are the first stage. The second, with the head, computes longer.
    traces = [stage_trace(n // 2, 2, us, False) for n, us in enumerate([4000, 5000, 500, 500])]
    paths = [trace.write(tmp_path / f"rank{n}.json") for n, trace in enumerate(traces)]
    found = diagnose(paths, asked=Asked("straggler", rank=0)).findings
    assert [f.rank for f in found if f.kind == "straggler"] == [0]


@pytest.mark.parametrize("on_gpu", [True, False])
def test_even_stages_that_hardly_wait_are_healthy(tmp_path: Path, on_gpu: bool) -> None:
    assert diagnosed(tmp_path, [500, 600], on_gpu).verdict == "healthy"


@pytest.mark.parametrize("place", [[0, 3], [0, 0], [True, 2], "first", None, [5, 2]])
def test_stages_that_are_not_all_there_or_not_said_are_not_compared(
    tmp_path: Path, place: object
) -> None:
    found = diagnosed(tmp_path, [6000, 500], on_gpu=True, pipeline=place)
    assert not {f.kind for f in found.findings} & {"stage_imbalance", "pipeline_bubble"}
