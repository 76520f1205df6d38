"""Who makes the host wait for the device."""

from __future__ import annotations

from tests.diagnosis.timeline import MAIN, Timeline
from warpwatch_diagnosis.measures.measures import measure


def test_a_read_is_counted_by_step_with_its_operator_and_its_line() -> None:
    timeline = Timeline(steps=3)
    for begin in (0, 10_000, 20_000):
        timeline.add("python", "/home/user/train.py(42): train", begin, 9_000)
        timeline.add("python", "torch/_tensor.py(10): item", begin + 1_000, 2_000)
        timeline.add("operator", "aten::item", begin + 1_000, 2_000)
        timeline.add("operator", "aten::_local_scalar_dense", begin + 1_010, 1_900)
        timeline.copy(begin + 2_500, 2, begin + 1_100, arguments={"bytes": 4})
        timeline.add("runtime", "cudaStreamSynchronize", begin + 1_120, 1_500)
    found = measure(timeline.trace).synchronization
    assert (found.count, found.per_step) == (6, (2, 2, 2))
    wait = found.calls[0]
    assert (wait.name, wait.operator) == ("cudaStreamSynchronize", "aten::_local_scalar_dense")
    assert (wait.place, wait.purpose) == ("home/user/train.py(42): train", "read")
    assert (wait.count, wait.total_us, wait.longest_us) == (3, 4_500, 1_500)


def test_the_stack_of_an_operator_has_the_line_where_there_are_no_frames() -> None:
    timeline = Timeline()
    stack = "/opt/site-packages/torch/_tensor.py(3): f;/a/b/c/run.py(7): loop;run.py(9): <module>"
    timeline.add("operator", "aten::nonzero", 0, 500, arguments={"Call stack": stack})
    timeline.kernel(0, 100, 10)
    timeline.add("runtime", "cudaDeviceSynchronize", 100, 50)
    (wait,) = measure(timeline.trace).synchronization.calls
    assert (wait.operator, wait.place, wait.purpose) == (
        "aten::nonzero", "b/c/run.py(7): loop", "wait",
    )  # fmt: skip


def test_waiting_for_events_on_the_device_or_on_another_thread_is_no_wait_of_the_loop() -> None:
    timeline = Timeline()
    timeline.kernel(0, 100, -10)
    timeline.add("runtime", "cudaStreamWaitEvent", 100, 50)
    timeline.add("runtime", "cudaEventSynchronize", 100, 50, thread="77/99")
    assert measure(timeline.trace).synchronization.count == 0


def test_a_copy_of_data_is_no_read() -> None:
    timeline = Timeline()
    timeline.copy(
        100,
        2_000,
        0,
        "Memcpy HtoD (Pageable -> Device)",
        call_us=2_200,
        arguments={"bytes": 1 << 24},
    )
    timeline.copy(3_000, 2_000, 2_900, call_us=2_200, arguments={"bytes": 1 << 24})
    timeline.copy(
        6_000, 2_000, 5_900, "Memcpy HtoD (Pinned -> Device)", arguments={"bytes": 1 << 24}
    )
    calls = measure(timeline.trace).synchronization.calls
    assert [(c.name, c.purpose, c.count) for c in calls] == [("cudaMemcpyAsync", "copy", 2)]


def test_without_a_gpu_the_operators_that_would_wait_are_counted() -> None:
    timeline = Timeline(steps=2)
    for at_us in (100, 200, 12_000):
        timeline.add("operator", "aten::item", at_us, 10, MAIN)
        timeline.add("operator", "aten::_local_scalar_dense", at_us + 1, 5, MAIN)
    found = measure(timeline.trace).synchronization
    assert (found.count, found.per_step) == (3, (2, 1))
    assert [c.name for c in found.calls] == ["aten::_local_scalar_dense"]
