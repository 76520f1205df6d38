"""Rules about what the host does, on traces with known times."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.diagnosis.traces import ORIGIN_US, STEP_US, TraceFile
from warpwatch_diagnosis.diagnosis import diagnose
from warpwatch_diagnosis.verdict.conclusion import Diagnosis


def diagnosed(tmp_path: Path, *traces: TraceFile) -> Diagnosis:
    return diagnose([t.write(tmp_path / f"rank{k}.json") for k, t in enumerate(traces)])


def filled(trace: TraceFile, free_us: int) -> TraceFile:
    """Operators that leave the first ``free_us`` of each step free."""
    for begin in trace.each_step():
        trace.operator(begin + free_us, STEP_US - free_us)
    return trace


def reads(trace: TraceFile, count: int, pace_us: int) -> TraceFile:
    for begin in trace.each_step():
        for k in range(count):
            trace.operator(begin + k * pace_us, 2, name="aten::item")
            trace.operator(begin + k * pace_us + 0.5, 1, name="aten::_local_scalar_dense")
    return trace


def test_a_loop_that_reads_values_is_sync_bound(tmp_path: Path) -> None:
    found = diagnosed(tmp_path, filled(reads(TraceFile(), 200, 10), free_us=2000))
    assert [f.kind for f in found.findings] == ["sync_bound"]
    assert found.findings[0].share == pytest.approx(0.2, abs=0.001)
    assert "200 values are read a step" in found.findings[0].evidence[1]


def test_a_few_values_a_step_are_no_loop(tmp_path: Path) -> None:
    found = diagnosed(tmp_path, filled(reads(TraceFile(), 9, 100), free_us=1000))
    assert found.verdict == "healthy"


def test_an_optimizer_that_reads_its_step_counters_is_no_loop(tmp_path: Path) -> None:
    trace = filled(reads(TraceFile(), 100, 10), free_us=1000)
    for begin in trace.each_step():
        trace.annotation("Optimizer.step#Adam.step", begin, 1000)
    assert diagnosed(tmp_path, trace).verdict == "healthy"


def test_a_gap_after_state_dict_is_a_checkpoint(tmp_path: Path) -> None:
    trace = filled(TraceFile(), free_us=3000)
    for begin in trace.each_step():
        for k in range(10):
            trace.operator(begin + 5 * k, 5, name="aten::detach")
    found = diagnosed(tmp_path, trace)
    assert [(f.kind, f.confidence) for f in found.findings] == [("checkpoint", "medium")]
    assert found.findings[0].share == pytest.approx(0.295)
    assert "saving every 42 steps would cost 1 % of the time" in found.findings[0].evidence[2]


def test_an_annotated_checkpoint_is_one(tmp_path: Path) -> None:
    trace = filled(TraceFile(), free_us=3000)
    trace.annotation("checkpoint", 0, 3000)
    found = diagnosed(tmp_path, trace)
    assert found.findings[-1].kind == "checkpoint"
    assert found.findings[-1].share == pytest.approx(0.075)


def test_the_collector_at_work_is_a_gc_pause(tmp_path: Path) -> None:
    trace = filled(TraceFile(), free_us=500)
    for begin in trace.each_step():
        trace.event("python_function", "Python GC", begin, 500, 77)
    found = diagnosed(tmp_path, trace)
    assert [(f.kind, f.share) for f in found.findings] == [("gc_pause", 0.05)]
    assert found.findings[0].advice.startswith("Call gc.freeze() once everything is built")


def test_a_collection_that_the_capture_noted_is_a_gc_pause(tmp_path: Path) -> None:
    base_us = 5_000_000
    noted = [[ORIGIN_US + base_us + 100, 300], [ORIGIN_US + base_us - 9_000_000, 1], ["x"], None]
    trace = TraceFile(warpwatch={"gc_pauses_us": noted}, baseTimeNanoseconds=base_us * 1000)
    trace.operator(0, 50)
    found = diagnosed(tmp_path, filled(trace, free_us=500))
    assert found.measures[0].host.gc.total_us == 300
    assert found.verdict == "healthy"
    trace.head["warpwatch"]["gc_pauses_us"].append([ORIGIN_US + base_us + STEP_US, 450])
    assert diagnosed(tmp_path, trace).verdict == "gc_pause"


def test_a_collection_of_batches_is_not_the_loaders(tmp_path: Path) -> None:
    trace = filled(TraceFile(), free_us=2000)
    for begin in trace.each_step():
        trace.annotation("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", begin, 2000)
        trace.event("python_function", "Python GC", begin + 500, 1500, 77)
    assert [f.kind for f in diagnosed(tmp_path, trace).findings] == ["gc_pause"]


@pytest.mark.parametrize(
    ("iterator", "verdict"),
    [("SingleProcess", "healthy"), ("MultiProcessing", "data_loading")],
)
def test_waiting_for_workers_costs_more_than_loading_by_oneself(
    tmp_path: Path, iterator: str, verdict: str
) -> None:
    trace = filled(TraceFile(), free_us=800)
    for begin in trace.each_step():
        trace.annotation(f"enumerate(DataLoader)#_{iterator}DataLoaderIter.__next__", begin, 800)
    assert diagnosed(tmp_path, trace).verdict == verdict


def compiled(frames: int, between_us: int) -> TraceFile:
    """Twenty regions a step of that many functions, with Python between them."""
    trace = TraceFile()
    for begin in trace.each_step():
        for k in range(20):
            at = begin + k * (STEP_US // 20)
            trace.operator(at, STEP_US // 20, name=f"Torch-Compiled Region: {k % frames}/0")
            trace.operator(at, between_us, name="TorchDynamo Cache Lookup")
            trace.operator(at + between_us, STEP_US // 20 - between_us, name="aten::mm")
    return trace


def test_python_between_pieces_of_compiled_code_is_graph_breaks(tmp_path: Path) -> None:
    found = diagnosed(tmp_path, compiled(frames=4, between_us=100))
    assert [f.kind for f in found.findings] == ["recompilation"]
    assert "a step calls 20 compiled regions of 4 functions" in found.findings[0].evidence[1]
    assert "graph_breaks" in found.findings[0].advice


def test_layers_that_are_compiled_one_by_one_are_no_graph_breaks(tmp_path: Path) -> None:
    assert diagnosed(tmp_path, compiled(frames=1, between_us=50)).verdict == "healthy"


def test_compiled_code_without_events_of_its_own_counts_as_operators(tmp_path: Path) -> None:
    trace = TraceFile()
    for begin in trace.each_step():
        trace.operator(begin, STEP_US, name="Torch-Compiled Region: 0/0")
    found = diagnosed(tmp_path, trace)
    assert found.summary == "operators run for 100 % of the step and nothing stands out"


def test_compiling_in_every_step_is_recompilation(tmp_path: Path) -> None:
    trace = filled(TraceFile(), free_us=2000)
    for begin in trace.each_step():
        trace.operator(begin, 2000, name="entire_frame_compile (dynamo_timed)")
    found = diagnosed(tmp_path, trace)
    assert [(f.kind, f.share, f.confidence) for f in found.findings] == [
        ("recompilation", 0.2, "high")
    ]
    assert "mark_dynamic" in found.findings[0].advice


def test_compiling_once_may_be_the_start(tmp_path: Path) -> None:
    trace = filled(TraceFile(), free_us=4000)
    trace.operator(0, 4000, name="entire_frame_compile (dynamo_timed)")
    for begin in list(trace.each_step())[1:]:
        trace.operator(begin, 4000)
    found = diagnosed(tmp_path, trace)
    assert [(f.kind, f.confidence) for f in found.findings] == [("recompilation", "medium")]
    assert found.findings[0].advice.startswith("If these were the first steps")
