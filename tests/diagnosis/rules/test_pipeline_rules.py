"""Pipelines whose stages wait for each other: because there are few micro-batches, or unevenly."""

import pytest

from tests.diagnosis.captures import diagnosed, event, kernel, operator, stepped
from tests.diagnosis.traces import STEP_US, TraceFile
from warpwatch_diagnosis.verdict.findings import Asked


def stage(number: int, of: int, waits_us: int, on_gpu: bool, **place: object) -> TraceFile:
    """Steps that compute, and wait ``waits_us`` for what another stage hands over."""
    name = "ncclDevKernel_SendRecv(ncclDevKernelArgs)"
    parts = (
        [kernel(waits_us, STEP_US - waits_us, 0), kernel(0, waits_us, -20, name)]
        if on_gpu
        else [
            operator(waits_us, STEP_US - waits_us),
            event("user_annotation", "gloo:recv", 0, waits_us, tid=99),
        ]
    )
    return stepped(*parts, warpwatch={"parallel": {"pipeline": [number, of]} | place})


def stages(waits_us: list[int], on_gpu: bool, **place: object) -> list[TraceFile]:
    return [stage(n, len(waits_us), us, on_gpu, **place) for n, us in enumerate(waits_us)]


@pytest.mark.parametrize("on_gpu", [True, False])
def test_waiting_of_the_busiest_stage_is_the_pipelines_bubble(tmp_path, on_gpu):
    found = diagnosed(tmp_path, *stages([4000, 4000], on_gpu))
    assert found.verdict == "pipeline_bubble"
    assert [f.kind for f in found.findings] == ["pipeline_bubble"]
    assert found.findings[0].share == pytest.approx(0.4)
    assert found.findings[0].recoverable_s == pytest.approx(4 * 0.004 / 2)
    assert "micro-batches" in found.findings[0].advice
    # Two stages with one and a half micro-batches wait two fifths of the time.
    assert "about 1.5 micro-batches" in found.findings[0].evidence[1]


@pytest.mark.parametrize("on_gpu", [True, False])
def test_a_stage_that_computes_longer_is_named_and_no_straggler(tmp_path, on_gpu, golden_text):
    # The third stage has two ranks; the one that computes longer is named.
    ranks = stages([6000, 6000, 500, 6000], on_gpu)
    found = diagnosed(tmp_path, *ranks, stage(2, 4, 900, on_gpu))
    golden_text(found)
    assert [(f.kind, f.rank) for f in found.findings] == [("stage_imbalance", 2)]
    finding = found.findings[0]
    assert finding.share == pytest.approx((9.3 - (3 * 4 + 9.3) / 4) / 10)
    assert "0: 4.0 ms, 1: 4.0 ms, 2: 9.3 ms, 3: 4.0 ms" in finding.evidence[1]


def test_who_was_late_before_the_capture_is_compared_with_its_own_stage(tmp_path):
    # Ranks 0 and 1 are the first stage. The second, with the head, computes longer.
    ranks = [stage(n // 2, 2, us, False) for n, us in enumerate([4000, 5000, 500, 500])]
    found = diagnosed(tmp_path, *ranks, asked=Asked("straggler", rank=0))
    assert [f.rank for f in found.findings if f.kind == "straggler"] == [0]


@pytest.mark.parametrize("on_gpu", [True, False])
def test_even_stages_that_hardly_wait_are_healthy(tmp_path, on_gpu):
    assert diagnosed(tmp_path, *stages([500, 600], on_gpu)).verdict == "healthy"


@pytest.mark.parametrize("place", [[0, 3], [0, 0], [True, 2], "first", None, [5, 2]])
def test_stages_that_are_missing_or_unknown_are_not_compared(tmp_path, place):
    found = diagnosed(tmp_path, *stages([6000, 500], on_gpu=True, pipeline=place))
    assert not {f.kind for f in found.findings} & {"stage_imbalance", "pipeline_bubble"}
