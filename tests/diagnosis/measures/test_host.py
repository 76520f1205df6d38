"""The host's activities beside operators, by the names of real traces, and its waits."""

import sys
from collections.abc import Callable
from typing import Any

import pytest

from tests.cases import cases
from tests.diagnosis.timeline import Timeline
from warpwatch_diagnosis.measures.host_events import HostTime
from warpwatch_diagnosis.measures.measures_json import cpu_ratios
from warpwatch_diagnosis.trace.events import Kind

CASES = cases(__file__)


def host(*added: tuple[Kind, str, float, float]) -> HostTime:
    timeline = Timeline()
    timeline.add("operator", "aten::mm", 0, 10)
    for one in added:
        timeline.add(*one)
    return timeline.measured().host


def test_nested_compilation_events_are_one_compilation():
    found = host(
        ("operator", "dynamo", 1_000, 5_000),
        ("operator", "_compile.compile_inner (dynamo_timed)", 1_100, 4_000),
        ("operator", "OutputGraph.call_user_compiler (dynamo_timed)", 1_200, 3_000),
        ("operator", "gc (dynamo_timed)", 1_300, 100),
        ("operator", "_compile.compile_inner (dynamo_timed)", 8_000, 500),
    )
    assert (found.compile.count, found.compile.total_us, found.gc.count) == (2, 5_500, 0)
    assert (found.compile.longest_us, found.compile.names[0]) == (5_000, "dynamo")


def test_regions_that_were_compiled_again_are_counted_apart():
    name = "Torch-Compiled Region"
    regions = [f"{name}: {one}" for one in ("0/0", "1/0", "0/1", "0/2_1", "0/2")]
    found = host(*(("operator", one, 100 + 10 * n, 5) for n, one in enumerate([*regions, name])))
    assert (found.compiled_regions, found.recompiled_regions) == (6, 2)
    assert found.compile.count == 0


@pytest.mark.parametrize(("names", "saved_us"), [(CASES["saving"], 500), (CASES["not_saving"], 0)])
def test_a_checkpoint_is_a_name_that_saves(names, saved_us):
    for kind, kept in names.items():
        for name in kept:
            assert host((kind, name, 1_000, 500)).checkpoint.total_us == saved_us, name


def test_enqueueing_a_collective_is_no_waiting_but_blocking_in_it_is():
    enqueued: tuple[Kind, str, float, float] = ("operator", "c10d::allreduce_", 100, 90)
    found = host(enqueued, ("operator", "c10d::barrier", 1_000, 2_000))
    assert (found.collectives.count, found.collectives.total_us) == (1, 2_000)


@pytest.mark.parametrize("name", ["cudaMallocAsync", "cudaFreeAsync", "cudaMemcpyAsync"])
def test_calls_that_do_not_go_to_the_driver_for_memory_are_no_allocation(name):
    assert host(("runtime", name, 100, 90)).allocator.count == 0


def test_a_cpu_only_trace_has_the_same_parts_disjoint():
    timeline = Timeline()
    timeline.add("operator", "_compile.compile_inner (dynamo_timed)", 0, 2_000)
    timeline.add("operator", "aten::empty", 500, 100)
    timeline.add("python", "Python GC", 3_000, 1_000)
    timeline.add("annotation", "torch.save", 5_000, 2_000)
    timeline.add("operator", "aten::mm", 8_000, 1_000)
    assert cpu_ratios(timeline.measured()) == {
        "operator_ratio": 0.1,
        "dispatch_ratio": 0.0,
        "collective_wait_ratio": 0.0,
        "host_ratio": 0.4,
        "compile_ratio": 0.2,
        "gc_ratio": 0.1,
        "checkpoint_ratio": 0.2,
    }


def test_a_read_is_counted_by_step_with_its_operator_and_its_line():
    timeline = Timeline(steps=3)
    for begin in (0, 10_000, 20_000):
        timeline.add("python", "/home/user/train.py(42): train", begin, 9_000)
        timeline.add("python", "torch/_tensor.py(10): item", begin + 1_000, 2_000)
        timeline.add("operator", "aten::item", begin + 1_000, 2_000)
        timeline.add("operator", "aten::_local_scalar_dense", begin + 1_010, 1_900)
        timeline.copy(begin + 2_500, 2, begin + 1_100, arguments={"bytes": 4})
        timeline.add("runtime", "cudaStreamSynchronize", begin + 1_120, 1_500)
    found = timeline.measured().synchronization
    assert (found.count, found.per_step) == (6, (2, 2, 2))
    wait = found.calls[0]
    assert (wait.name, wait.operator) == ("cudaStreamSynchronize", "aten::_local_scalar_dense")
    assert (wait.place, wait.purpose) == ("home/user/train.py(42): train", "read")
    assert (wait.count, wait.total_us, wait.longest_us) == (3, 4_500, 1_500)


def test_the_stack_of_an_operator_has_the_line_where_there_are_no_frames():
    timeline = Timeline()
    stack = "/opt/site-packages/torch/_tensor.py(3): f;/a/b/c/run.py(7): loop;run.py(9): <module>"
    timeline.add("operator", "aten::nonzero", 0, 500, arguments={"Call stack": stack})
    timeline.kernel(0, 100, 10)
    timeline.add("runtime", "cudaDeviceSynchronize", 100, 50)
    (wait,) = timeline.measured().synchronization.calls
    found = (wait.operator, wait.place, wait.purpose)
    assert found == ("aten::nonzero", "b/c/run.py(7): loop", "wait")


def test_waiting_for_events_on_the_device_or_on_another_thread_is_no_wait_of_the_loop():
    timeline = Timeline()
    timeline.kernel(0, 100, -10)
    timeline.add("runtime", "cudaStreamWaitEvent", 100, 50)
    timeline.add("runtime", "cudaEventSynchronize", 100, 50, thread="77/99")
    assert timeline.measured().synchronization.count == 0


def test_a_copy_of_data_is_no_read():
    timeline = Timeline()
    size: dict[str, Any] = {"bytes": 1 << 24}
    pageable, pinned = (f"Memcpy HtoD ({memory} -> Device)" for memory in ("Pageable", "Pinned"))
    timeline.copy(100, 2_000, 0, pageable, call_us=2_200, arguments=size)
    timeline.copy(3_000, 2_000, 2_900, call_us=2_200, arguments=size)
    timeline.copy(6_000, 2_000, 5_900, pinned, arguments=size)
    calls = timeline.measured().synchronization.calls
    assert [(c.name, c.purpose, c.count) for c in calls] == [("cudaMemcpyAsync", "copy", 2)]


def test_without_a_gpu_the_operators_that_would_wait_are_counted():
    timeline = Timeline(steps=2)
    for at_us in (100, 200, 12_000):
        timeline.add("operator", "aten::item", at_us, 10)
        timeline.add("operator", "aten::_local_scalar_dense", at_us + 1, 5)
    found = timeline.measured().synchronization
    assert (found.count, found.per_step) == (3, (2, 1))
    assert [c.name for c in found.calls] == ["aten::_local_scalar_dense"]


def frames_around_reads(count: int) -> Timeline:
    timeline = Timeline()
    for n in range(count):
        timeline.add("operator", "aten::nonzero", n / 2, 0.25)
        timeline.add("python", f"train.py({n}): step", 0, 9_000)
    return timeline


def steps_over_each_other(count: int) -> Timeline:
    timeline = Timeline(steps=0)
    for n in range(count):
        timeline.add("annotation", f"ProfilerStep#{n}", 0, 3_000)
        timeline.kernel(n / 2, 0.25, None)
    return timeline


@pytest.mark.parametrize("events", [frames_around_reads, steps_over_each_other])
def test_twice_the_events_cost_twice_the_work(events):
    """A trace of 100 kB that is packed well could keep its reader busy for minutes otherwise."""
    once, twice = (lines_run(events(count).measured) for count in (300, 600))
    assert twice < 2.5 * once


def lines_run(function: Callable[[], object]) -> int:
    """Count the lines of Python that a call runs, iterations of a loop in one line included."""
    lines = 0

    def trace(frame: Any, event: str, argument: Any) -> Any:
        nonlocal lines
        lines += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(before)
    return lines
