"""The window of a trace and its steps: their numbers, memory over time, and the longest, drawn."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.diagnosis.captures import event, kernel, loading, stepped
from tests.diagnosis.timeline import Timeline
from tests.diagnosis.traces import LOADER, ORIGIN_US, TraceFile
from warpwatch_diagnosis.measures.intervals import difference, intersection, total, union
from warpwatch_diagnosis.measures.measures import Measures, measure
from warpwatch_diagnosis.measures.measures_json import trace_json
from warpwatch_diagnosis.measures.steps import RESOLUTION, Lane
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


def test_each_step_has_its_own_share_of_what_crosses_its_border():
    timeline = Timeline(steps=2)
    timeline.kernel(9_000, 3_000, launched_us=8_990)
    timeline.kernel(11_000, 2_000, launched_us=8_995, name="ncclDevKernel_AllReduce")
    timeline.copy(15_000, 500, 14_000, PINNED)
    timeline.add("annotation", LOADER, 0, 4_000)
    first, second = timeline.measured().per_step
    assert (first.number, first.duration_us, first.data_loading_us) == (0, 10_000, 4_000)
    assert (first.gpu_busy_us, second.gpu_busy_us) == (1_000, 3_500)
    assert (first.compute_us, second.compute_us) == (1_000, 2_000)
    assert (second.communication_us, second.exposed_communication_us) == (2_000, 1_000)
    assert (first.memory_copy_us, second.memory_copy_us) == (0, 500)
    assert first.idle_us["data_loading"] == 4_000
    for step in (first, second):
        assert step.gpu_busy_us is not None
        assert sum(step.idle_us.values()) == pytest.approx(step.duration_us - step.gpu_busy_us)


def test_without_a_gpu_a_step_knows_its_data_loading_only():
    timeline = Timeline(steps=2)
    timeline.add("operator", "aten::mm", 0, 20_000)
    timeline.add("annotation", LOADER, 9_000, 3_000)
    first, second = timeline.measured().per_step
    assert (first.data_loading_us, second.data_loading_us) == (1_000, 2_000)
    assert (first.gpu_busy_us, first.idle_us) == (None, {})


def test_memory_has_peaks_and_growth_by_device_where_the_trace_has_totals():
    timeline = Timeline()
    timeline.add("operator", "aten::mm", 0, 10_000)
    allocated = {0: 1_000, 20: 5_000, 5_000: 9_000, 9_990: 3_000, 50_000: 1 << 40}
    # Time, place, and what is allocated in all.
    changes: list[tuple[float, dict[str, int], int | None]] = [
        *((at_us, {"Device Type": 1, "Device Id": 0}, size) for at_us, size in allocated.items()),
        (10, {"Device Type": 1, "Device Id": 1}, None),
        (100, {"Device Type": 0, "Device Id": 0}, 64),
    ]
    for at_us, place, size in changes:
        totals = {} if size is None else {"Total Allocated": size, "Total Reserved": 2 * size}
        arguments = {"Bytes": 512, **place, **totals}
        timeline.add("memory", "[memory]", at_us, 0, arguments=arguments)
    found = {use.device: use for use in timeline.measured().memory}
    gpu, unknown, cpu = (found[device] for device in ("0", "1", "cpu"))
    assert (gpu.allocations, gpu.growth_bytes) == (4, 2_000)
    assert (gpu.allocated_peak_bytes, gpu.reserved_peak_bytes) == (9_000, 18_000)
    assert (cpu.allocated_peak_bytes, cpu.growth_bytes) == (64, 0)
    assert (unknown.allocated_peak_bytes, unknown.growth_bytes) == (None, None)


def spans(lane: Lane) -> list[tuple[float, float, str]]:
    return [(s.begin_us, s.end_us, s.label) for s in lane.spans]


def test_the_longest_step_has_lanes_for_the_host_each_stream_and_the_idle_time():
    timeline = Timeline(steps=1)
    timeline.add("annotation", "ProfilerStep#7", 10_000, 20_000)
    timeline.add("annotation", LOADER, 10_000, 5_000)
    timeline.add("operator", "aten::mm", 15_000, 100)
    timeline.kernel(15_100, 4_900, launched_us=15_050, name="ampere_sgemm_128x64_nn")
    timeline.copy(20_000, 10_000, 15_090, PINNED)
    found = timeline.measured().timeline
    assert (found.number, found.duration_us) == (7, 20_000)
    kinds = [("host", "host"), ("0/7", "stream"), ("idle", "idle")]
    assert [(lane.name, lane.kind) for lane in found.lanes] == kinds
    host, stream, idle = found.lanes
    assert spans(host) == [(0, 5_000, "data_loading"), (5_000, 5_100, "operator")]
    assert spans(stream) == [(5_100, 10_000, "gemm"), (10_000, 20_000, "HtoD")]
    assert stream.spans[0].name == "ampere_sgemm_128x64_nn"
    assert spans(idle) == [
        (0, 5_000, "data_loading"),
        (5_000, 5_050, "dispatch"),
        (5_050, 5_100, "launch"),
    ]


def test_thousands_of_short_kernels_become_few_spans_of_the_longest():
    timeline = Timeline(step_us=100_000)
    for index in range(5_000):
        name = "ampere_sgemm_128x64_nn" if index % 2 else "vectorized_elementwise_kernel"
        timeline.kernel(20 * index, 1 + index % 2, launched_us=None, name=name)
    found = timeline.measured().timeline
    stream = found.lanes[1]
    assert 1 <= len(stream.spans) <= RESOLUTION
    assert {span.label for span in stream.spans} == {"gemm"}
