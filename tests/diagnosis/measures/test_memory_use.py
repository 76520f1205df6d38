"""Memory over the window, by device."""

from __future__ import annotations

from tests.diagnosis.timeline import Timeline
from warpwatch_diagnosis.measures.measures import measure


def memory(timeline: Timeline, at_us: float, total: int | None, device: int | None = 0) -> None:
    arguments = {"Bytes": 512, "Device Type": 0 if device is None else 1, "Device Id": device or 0}
    if total is not None:
        arguments |= {"Total Allocated": total, "Total Reserved": 2 * total}
    timeline.add("memory", "[memory]", at_us, 0, arguments=arguments)


def test_peaks_and_growth_of_each_device() -> None:
    timeline = Timeline()
    timeline.add("operator", "aten::mm", 0, 10_000)
    for at_us, allocated in ((0, 1_000), (20, 5_000), (5_000, 9_000), (9_990, 3_000)):
        memory(timeline, at_us, allocated)
    memory(timeline, 100, 64, device=None)
    memory(timeline, 50_000, 1 << 40)
    gpu, cpu = measure(timeline.trace).memory
    assert (gpu.device, cpu.device, gpu.allocations) == ("0", "cpu", 4)
    assert (gpu.allocated_peak_bytes, gpu.reserved_peak_bytes) == (9_000, 18_000)
    assert gpu.growth_bytes == 2_000
    assert (cpu.allocated_peak_bytes, cpu.growth_bytes) == (64, 0)


def test_traces_that_tell_only_sizes_have_no_peaks() -> None:
    timeline = Timeline()
    timeline.add("operator", "aten::mm", 0, 10_000)
    memory(timeline, 10, None)
    (found,) = measure(timeline.trace).memory
    assert (found.allocations, found.allocated_peak_bytes, found.growth_bytes) == (1, None, None)
