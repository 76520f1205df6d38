"""The window of a trace and its steps: their numbers, memory over time, and the longest, drawn."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.diagnosis.captures import event, kernel, loading, stepped
from tests.diagnosis.timeline import Timeline
from tests.diagnosis.traces import LOADER, ORIGIN_US, TraceFile
from warpwatch_diagnosis.intervals import difference, intersection, total, union
from warpwatch_diagnosis.measures.measures import Measures, measure, trace_json
from warpwatch_diagnosis.trace.reader import read_trace

PINNED = "Memcpy HtoD (Pinned -> Device)"
SPANS = st.lists(st.tuples(st.integers(0, 200), st.integers(0, 60)), max_size=20)


def measured(trace: TraceFile, tmp_path: Path) -> Measures:
    return measure(read_trace(trace.write(tmp_path / "trace.json")))


@given(SPANS, SPANS)
def test_set_operations_count_instants(left, right):
    def instants(spans: list[tuple[int, int]]) -> set[int]:
        return {t for begin, size in spans for t in range(begin, begin + size)}

    a = union((float(b), float(b + size)) for b, size in left)
    b = union((float(b), float(b + size)) for b, size in right)
    assert total(a) == len(instants(left))
    assert total(intersection(a, b)) == len(instants(left) & instants(right))
    assert total(difference(a, b)) == len(instants(left) - instants(right))


def test_overlapping_kernels_copies_and_collectives_are_counted_once(tmp_path):
    trace = stepped(
        loading(1000),
        kernel(2000, 4000, 1000),
        kernel(3000, 1000, 1010),
        kernel(5000, 3000, 1020, "ncclDevKernel_AllReduce_Sum_f32_RING"),
        event("gpu_memcpy", PINNED, 7000, 2000, 9),
        steps=2,
        deviceProperties=[{"id": 0, "name": "Tesla"}],
    )
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


@pytest.mark.parametrize(
    ("category", "name", "at_us", "us"),
    [
        # The copy of an annotation on the GPU, and a step that the end of the recording cut.
        ("gpu_user_annotation", "ProfilerStep#3", 500_000, 900_000),
        ("user_annotation", "ProfilerStep#9", 20_000, 40),
    ],
)
def test_no_other_event_is_a_step(tmp_path, category, name, at_us, us):
    trace = TraceFile(steps=2)
    trace.event(category, name, at_us, us, 7)
    trace.operator(0, 100)
    found = measured(trace, tmp_path)
    assert (len(found.steps), found.window_s) == (2, 0.02)


def test_without_steps_the_window_is_the_span_of_the_gpu_events(tmp_path):
    trace = TraceFile(steps=0)
    trace.operator(0, 90_000)
    trace.kernel(20_000, 1_000, launched_us=19_000)
    trace.kernel(29_000, 1_000, launched_us=19_500)
    found = measured(trace, tmp_path)
    assert (found.steps, found.window_s, found.timeline) == ((), 0.01, None)


def test_launches_without_gpu_events_are_a_shortage(tmp_path):
    trace = TraceFile()
    trace.operator(0, 5_000)
    trace.event("cuda_runtime", "cudaLaunchKernel", 10, 5, 77)
    assert measured(trace, tmp_path).shortage == (
        "1 kernels were launched but no GPU event was recorded; record with "
        "ProfilerActivity.CUDA, and with no other profiler on the GPU"
    )


def test_a_loader_event_that_began_before_the_window_counts_from_its_begin(tmp_path):
    trace = TraceFile(steps=2)
    trace.operator(5000, 5000)
    trace.annotation(LOADER, -3000, 4000)
    found = measured(trace, tmp_path)
    assert found.window[0] == ORIGIN_US
    assert found.share(found.loading) == pytest.approx(0.05)


def test_thousands_of_short_kernels_become_few_spans_of_the_longest():
    timeline = Timeline(step_us=100_000)
    for index in range(5_000):
        name = "ampere_sgemm_128x64_nn" if index % 2 else "vectorized_elementwise_kernel"
        timeline.kernel(20 * index, 1 + index % 2, launched_us=None, name=name)
    found = timeline.measured().timeline
    stream = found.lanes[1]
    assert 1 <= len(stream.spans) <= 2000
    assert {span.label for span in stream.spans} == {"gemm"}
