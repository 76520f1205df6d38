"""Idle time is split into causes that add up to it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.diagnosis.timeline import MAIN, Timeline
from tests.diagnosis.traces import LOADER
from warpwatch_diagnosis.measures.idle import IdleTime
from warpwatch_diagnosis.measures.idle_causes import CAUSES
from warpwatch_diagnosis.measures.intervals import intersection, total, union
from warpwatch_diagnosis.measures.measures import measure
from warpwatch_diagnosis.trace.kinds import Kind


def idle(timeline: Timeline) -> IdleTime:
    gpu = measure(timeline.trace).gpu
    assert gpu is not None
    assert total(union(span for c in CAUSES for span in gpu.idle_time.by_cause[c])) == (
        pytest.approx(total(gpu.idle))
    )
    return gpu.idle_time


def causes(timeline: Timeline) -> dict[str, float]:
    found = idle(timeline)
    return {cause: round(us, 3) for cause in CAUSES if (us := found.total_us(cause))}


def one_gap(until_us: float = 9_000) -> Timeline:
    """The device works for 6 ms, then is idle until a kernel that the host launched late."""
    timeline = Timeline()
    timeline.kernel(0, 6_000, launched_us=-100)
    timeline.kernel(until_us + 10, 990 + 9_000 - until_us, launched_us=until_us)
    return timeline


def test_a_host_that_does_nothing_visible_is_host_and_the_way_to_the_device_is_launch() -> None:
    assert causes(one_gap()) == {"host": 3_000, "launch": 10}


def test_an_operator_that_does_not_launch_is_dispatch() -> None:
    timeline = one_gap()
    timeline.add("operator", "aten::convolution", 7_000, 2_100)
    timeline.add("operator", "aten::empty", 7_100, 100)
    assert causes(timeline) == {"host": 1_000, "dispatch": 2_000, "launch": 10}


def test_a_python_autograd_function_is_no_dispatch_since_it_may_hold_anything() -> None:
    timeline = one_gap()
    name = "autograd::engine::evaluate_function: CheckpointFunctionBackward"
    timeline.add("operator", name, 6_000, 3_100)
    assert causes(timeline) == {"host": 3_000, "launch": 10}


@pytest.mark.parametrize(
    ("kind", "name", "cause"),
    [
        ("annotation", LOADER, "data_loading"),
        ("python", "Python GC", "gc"),
        ("python", "<built-in function collect>", "gc"),
        ("operator", "_compile.compile_inner (dynamo_timed)", "compile"),
        ("python", "torch/_dynamo/convert_frame.py(1633): _compile", "compile"),
        ("annotation", "save_checkpoint", "checkpoint"),
        ("python", "lib/site-packages/torch/serialization.py(9): save", "checkpoint"),
        ("runtime", "cudaMalloc", "allocator"),
        ("runtime", "cudaFree", "allocator"),
        ("runtime", "hipHostMalloc", "allocator"),
        ("runtime", "cuMemCreate", "allocator"),
        ("operator", "c10d::barrier", "communication"),
        ("annotation", "gloo:all_reduce", "communication"),
    ],
)  # fmt: skip
def test_what_has_a_name_in_the_trace_takes_its_part_of_the_gap(
    kind: Kind, name: str, cause: str
) -> None:
    timeline = one_gap()
    timeline.add(kind, name, 6_500, 2_000)
    assert causes(timeline) == {cause: 2_000, "host": 1_000, "launch": 10}


def test_named_causes_count_once_the_earliest_in_the_chain_first() -> None:
    timeline = one_gap()
    timeline.add("annotation", LOADER, 6_000, 3_000)
    timeline.add("python", "Python GC", 7_000, 500)
    timeline.add("runtime", "cudaMalloc", 7_200, 1_000)
    assert causes(timeline) == {"gc": 500, "data_loading": 2_500, "launch": 10}


def test_what_other_threads_do_is_no_cause_but_garbage_collection_is() -> None:
    timeline = one_gap()
    timeline.add("runtime", "cudaHostAlloc", 6_000, 3_000, thread="77/99")
    timeline.add("python", "Python GC", 8_000, 400, thread="77/99")
    assert causes(timeline) == {"gc": 400, "host": 2_600, "launch": 10}


def test_idle_time_after_a_wait_is_synchronization_up_to_what_the_host_waited() -> None:
    long, short = one_gap(), one_gap()
    long.add("runtime", "cudaStreamSynchronize", 1_000, 5_010)
    short.add("runtime", "cudaStreamSynchronize", 5_500, 510)
    assert causes(long) == {"synchronization": 3_010}
    assert causes(short) == {"synchronization": 510, "host": 2_490, "launch": 10}


def test_a_wait_for_a_device_that_does_nothing_is_synchronization() -> None:
    timeline = one_gap()
    timeline.add("runtime", "cudaDeviceSynchronize", 7_000, 1_000)
    assert causes(timeline) == {"synchronization": 1_000, "host": 2_000, "launch": 10}


def test_a_long_wait_while_the_device_works_costs_nothing_once_the_host_leads_again() -> None:
    timeline = Timeline()
    timeline.kernel(0, 6_000, launched_us=-100)
    timeline.add("runtime", "cudaEventSynchronize", 500, 4_500)
    timeline.kernel(6_000, 1_000, launched_us=5_100)
    timeline.kernel(9_000, 1_000, launched_us=8_990)
    assert causes(timeline) == {"host": 1_990, "launch": 10}


def test_idle_time_after_freeing_memory_is_the_allocators_since_that_synchronizes() -> None:
    timeline = one_gap()
    timeline.add("runtime", "cudaFree", 1_000, 5_010)
    timeline.add("runtime", "cudaMalloc", 6_010, 90)
    assert causes(timeline) == {"allocator": 3_010}


def test_a_wait_for_a_copy_to_the_device_is_copy() -> None:
    timeline = Timeline()
    timeline.kernel(0, 1_000, launched_us=-100)
    timeline.copy(
        3_000,
        1_000,
        1_000,
        "Memcpy HtoD (Pageable -> Device)",
        call_us=3_020,
        arguments={"bytes": 1 << 24},
    )
    timeline.kernel(4_500, 5_500, launched_us=4_490)
    assert causes(timeline) == {"copy": 2_500}


def test_a_read_of_a_value_is_synchronization_although_it_copies() -> None:
    timeline = Timeline()
    timeline.kernel(0, 5_000, launched_us=-100)
    timeline.copy(5_000, 2, 100, call_us=4_910, arguments={"bytes": 4})
    timeline.add("runtime", "cudaStreamSynchronize", 5_012, 3)
    timeline.kernel(6_000, 4_000, launched_us=5_990)
    assert causes(timeline) == {"synchronization": 998}


def test_a_host_that_launches_as_fast_as_it_can_is_launch() -> None:
    timeline = Timeline(step_us=1_000)
    for begin in range(0, 1_000, 50):
        timeline.kernel(begin, 10, launched_us=begin - 8)
    timeline.kernel(1_000, 10, launched_us=992)
    assert causes(timeline) == {"launch": 800}


def test_work_that_was_queued_is_not_the_hosts_fault() -> None:
    timeline = Timeline(step_us=1_000)
    for begin in (0, 305, 700):
        timeline.kernel(begin, 300, launched_us=-500)
    assert causes(timeline) == {"kernel_gap": 5, "unexplained": 95}


def test_work_without_a_launch_leaves_only_what_has_a_name() -> None:
    timeline = Timeline()
    timeline.kernel(0, 1_000, launched_us=None)
    timeline.add("annotation", LOADER, 2_000, 3_000)
    timeline.kernel(6_000, 4_000, launched_us=None)
    assert causes(timeline) == {"data_loading": 3_000, "unexplained": 2_000}


def test_the_first_and_the_last_gap_of_the_window_count() -> None:
    timeline = Timeline()
    timeline.add("annotation", LOADER, 0, 1_990)
    timeline.kernel(2_000, 1_000, launched_us=1_990)
    timeline.add("annotation", "save_checkpoint", 4_000, 5_000)
    assert causes(timeline) == {
        "checkpoint": 5_000,
        "data_loading": 1_990,
        "launch": 10,
        "host": 2_000,
    }


def test_the_last_gap_looks_at_the_work_that_follows_the_window() -> None:
    timeline = Timeline()
    timeline.kernel(0, 9_000, launched_us=-100)
    timeline.kernel(12_000, 1_000, launched_us=500)
    assert causes(timeline) == {"unexplained": 1_000}


def test_the_worst_gaps_name_the_work_that_came_late() -> None:
    timeline = Timeline()
    for begin in (100, 1_600, 3_600, 8_000):
        timeline.kernel(begin, 500, begin - 10, name=f"kernel_{begin}")
    worst = idle(timeline).worst["host"]
    assert [gap.before for gap in worst] == ["kernel_8000", None, "kernel_3600"]
    assert [gap.end_us - gap.begin_us for gap in worst] == [3_900, 1_500, 1_500]


SPANS = st.lists(st.tuples(st.integers(0, 900), st.integers(0, 200)), max_size=8)


@given(SPANS, SPANS, SPANS, SPANS, SPANS)
def test_causes_are_disjoint_and_add_up_to_the_idle_time(
    kernels: list[tuple[int, int]],
    waits: list[tuple[int, int]],
    operators: list[tuple[int, int]],
    loads: list[tuple[int, int]],
    allocations: list[tuple[int, int]],
) -> None:
    timeline = Timeline(step_us=1_000)
    timeline.kernel(1_200, 1, launched_us=300)
    for at, us in kernels:
        timeline.kernel(at, us, launched_us=at - us)
    for kind, name, spans in (
        ("runtime", "cudaStreamSynchronize", waits),
        ("runtime", "cudaMalloc", allocations),
        ("operator", "aten::mm", operators),
        ("annotation", LOADER, loads),
    ):
        for at, us in spans:
            timeline.add(kind, name, at, us, MAIN)  # type: ignore[arg-type]
    gpu = measure(timeline.trace).gpu
    if gpu is None:
        return
    parts = [span for cause in CAUSES for span in gpu.idle_time.by_cause[cause]]
    assert total(parts) == pytest.approx(total(gpu.idle), abs=1e-6)
    assert total(union(parts)) == pytest.approx(total(parts), abs=1e-6)
    assert not intersection(union(parts), gpu.busy)


@pytest.mark.parametrize(
    ("name", "cause"),
    [
        ("CopyHostToDevice", "copy"),
        ("Memcpy HtoD (Pinned -> Device)", "copy"),
        ("Memset (Device)", "launch"),
        ("moe::grouptopk_kernel", "launch"),
    ],
)
def test_the_way_of_a_copy_to_the_device_is_the_copys_by_whatever_name(
    name: str, cause: str
) -> None:
    timeline = Timeline()
    timeline.kernel(0, 6_000, launched_us=-100)
    timeline.copy(6_100, 3_900, 6_000, name, call="hipMemcpyAsync")
    assert causes(timeline) == {cause: 100}
