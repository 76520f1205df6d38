"""How the host feeds the device."""

from __future__ import annotations

from tests.diagnosis.timeline import Timeline
from warpwatch_diagnosis.measures.launches import Launches
from warpwatch_diagnosis.measures.measures import measure


def launches(timeline: Timeline) -> Launches:
    gpu = measure(timeline.trace).gpu
    assert gpu is not None
    return gpu.launches


def test_calls_delays_and_outliers() -> None:
    timeline = Timeline()
    timeline.kernel(100, 2, launched_us=90)
    timeline.kernel(1_000, 500, launched_us=400, call_us=60)
    timeline.kernel(2_000, 500, launched_us=1_890)
    timeline.kernel(3_000, 500, launched_us=None)
    timeline.kernel(4_000, 500, launched_us=3_990, call="cudaGraphLaunch", call_us=20)
    found = launches(timeline)
    assert (found.count, found.without_launch, found.in_graphs) == (4, 1, 1)
    assert (found.total_call_us, found.median_call_us) == (90, 12.5)
    assert (found.slow_calls, found.late_starts, found.short_kernels) == (1, 2, 1)
    assert found.median_delay_us == 55


def test_the_queue_grows_with_each_call_and_shrinks_when_work_begins() -> None:
    timeline = Timeline()
    for index in range(4):
        timeline.kernel(1_000 + 1_000 * index, 1_000, launched_us=100 * index)
    timeline.kernel(9_000, 10, launched_us=8_990, stream="0/20")
    main, side = launches(timeline).queues
    assert (main.stream, main.launches, main.longest, main.full_us) == ("0/7", 4, 4, 0)
    assert main.mean == (1 * 100 + 2 * 100 + 3 * 100 + 4 * 700 + (3 + 2 + 1) * 1_000) / 10_000
    assert (side.longest, side.launches) == (1, 1)


def test_a_graphs_launch_counts_once_and_its_kernels_neither_queue_nor_are_short() -> None:
    timeline = Timeline()
    timeline.add("runtime", "cudaGraphLaunch", 100, 80, correlation=900)
    for index in range(2_000):
        timeline.add("kernel", "gemm", 200 + 4 * index, 4, "0/7", 900)
    timeline.kernel(9_000, 500, launched_us=8_900)
    found = launches(timeline)
    assert (found.count, found.in_graphs, found.without_launch) == (2, 2_000, 0)
    assert (found.total_call_us, found.median_call_us, found.slow_calls) == (85, 42.5, 1)
    assert (found.median_delay_us, found.late_starts, found.short_kernels) == (57.5, 0, 0)
    (queue,) = found.queues
    assert (queue.launches, queue.longest, queue.full_us) == (1, 1, 0)
    gpu = measure(timeline.trace).gpu
    assert gpu is not None and gpu.kernels.median_launch_us == 42.5
