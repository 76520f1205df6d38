"""The numbers are unions of intervals over the step window, whatever the order of the events."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.diagnosis.traces import LOADER, ORIGIN_US, TraceFile, cpu_rank
from warpwatch_diagnosis.measures.intervals import difference, intersection, total, union
from warpwatch_diagnosis.measures.measures import Measures, measure
from warpwatch_diagnosis.measures.measures_json import trace_json
from warpwatch_diagnosis.trace.reader import read_trace

SPANS = st.lists(st.tuples(st.integers(0, 200), st.integers(0, 60)), max_size=20)


def measured(trace: TraceFile, tmp_path: Path, name: str = "trace.json") -> Measures:
    return measure(read_trace(trace.write(tmp_path / name)))


def test_overlapping_kernels_copies_and_collectives_are_counted_once(tmp_path: Path) -> None:
    trace = TraceFile(steps=2, deviceProperties=[{"id": 0, "name": "Tesla"}])
    for begin in trace.each_step():
        trace.annotation(LOADER, begin, 1000)
        trace.kernel(begin + 2000, 4000, launched_us=begin + 1000)
        trace.kernel(begin + 3000, 1000, launched_us=begin + 1010)
        trace.kernel(begin + 5000, 3000, begin + 1020, name="ncclDevKernel_AllReduce_Sum_f32_RING")
        trace.event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", begin + 7000, 2000, 9)
    found = trace_json(measured(trace, tmp_path))
    assert found["device_name"] == "Tesla"
    assert (found["steps"], found["window_s"], found["cpu"]) == (2, 0.02, None)
    assert found["time"] == {
        "gpu_busy_ratio": 0.7,
        "idle_ratio": 0.3,
        "compute_ratio": 0.4,
        "communication_ratio": 0.3,
        "exposed_communication_ratio": 0.2,
        "overlap_ratio": 0.3333,
        "memory_copy_ratio": 0.2,
        "data_loading_ratio": 0.1,
    }


def test_a_cpu_trace_has_no_gpu_ratios_but_the_training_threads_times(tmp_path: Path) -> None:
    trace = cpu_rank(1, host_us=2000, loading_us=3000, waiting_us=1000)
    for begin in trace.each_step():
        trace.operator(begin + 3500, 5, name="aten::add")
    found = trace_json(measured(trace, tmp_path))
    assert {value for key, value in found["time"].items() if key != "data_loading_ratio"} == {None}
    assert found["time"]["data_loading_ratio"] == 0.3
    assert found["cpu"] == {
        "operator_ratio": 0.4005,
        "dispatch_ratio": 0.0005,
        "collective_wait_ratio": 0.1,
        "host_ratio": 0.1995,
        "compile_ratio": 0.0,
        "gc_ratio": 0.0,
        "checkpoint_ratio": 0.0,
    }


def test_the_gpu_copies_of_step_annotations_are_no_steps(tmp_path: Path) -> None:
    trace = TraceFile(steps=2)
    trace.event("gpu_user_annotation", "ProfilerStep#3", 500_000, 900_000, 7)
    trace.operator(0, 100)
    found = measured(trace, tmp_path)
    assert (len(found.steps), found.window_s) == (2, 0.02)


def test_a_last_step_of_some_microseconds_is_no_step(tmp_path: Path) -> None:
    trace = TraceFile(steps=3)
    trace.annotation("ProfilerStep#9", 30_000, 40)
    trace.operator(0, 100)
    assert len(measured(trace, tmp_path).steps) == 3


def test_without_steps_the_window_is_the_span_of_the_gpu_events(tmp_path: Path) -> None:
    trace = TraceFile(steps=0)
    trace.operator(0, 90_000)
    trace.kernel(20_000, 1_000, launched_us=19_000)
    trace.kernel(29_000, 1_000, launched_us=19_500)
    found = measured(trace, tmp_path)
    assert (found.steps, found.window_s) == ((), 0.01)


def test_launches_without_gpu_events_are_a_shortage(tmp_path: Path) -> None:
    trace = TraceFile()
    trace.operator(0, 5_000)
    trace.event("cuda_runtime", "cudaLaunchKernel", 10, 5, 77)
    assert measured(trace, tmp_path).shortage == (
        "1 kernels were launched but no GPU event was recorded; record with "
        "ProfilerActivity.CUDA, and with no other profiler on the GPU"
    )


@given(SPANS, SPANS)
def test_set_operations_agree_with_counting_instants(
    left: list[tuple[int, int]], right: list[tuple[int, int]]
) -> None:
    def instants(spans: list[tuple[int, int]]) -> set[int]:
        return {t for begin, size in spans for t in range(begin, begin + size)}

    a = union((float(b), float(b + size)) for b, size in left)
    b = union((float(b), float(b + size)) for b, size in right)
    assert total(a) == len(instants(left))
    assert total(intersection(a, b)) == len(instants(left) & instants(right))
    assert total(difference(a, b)) == len(instants(left) - instants(right))


def test_a_loader_event_that_began_before_the_window_counts_from_its_begin(tmp_path: Path) -> None:
    trace = TraceFile(steps=2)
    trace.operator(5000, 5000)
    trace.annotation(LOADER, -3000, 4000)
    found = measured(trace, tmp_path)
    assert found.window[0] == ORIGIN_US
    assert found.share(found.loading) == pytest.approx(0.05)
