"""Memory over time, from the [memory] events of profile_memory=True."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from warpwatch_diagnosis.measures.intervals import Interval
from warpwatch_diagnosis.trace.reader import Event

POINTS = 200
# c10::DeviceType of what has no memory of its own.
_CPU_TYPE = 0


@dataclass(frozen=True, slots=True)
class MemoryTimeline:
    """One device's allocator in the window; ``device`` is "cpu" or the GPU's index.

    allocations: number of allocations; peaks in bytes, None where the trace does not tell (before
    PyTorch 1.12). growth_bytes: allocated at the end of the window less at its begin.
    points: at most POINTS of (time in µs from the window's begin, allocated, reserved bytes), each
    the peak of its stretch of time.
    """

    device: str
    allocations: int
    allocated_peak_bytes: int | None
    reserved_peak_bytes: int | None
    growth_bytes: int | None
    points: tuple[tuple[float, int, int | None], ...]


def memory_timelines(events: Sequence[Event], window: Interval) -> tuple[MemoryTimeline, ...]:
    """One for each device with [memory] events in the window, GPUs first."""
    low, high = window
    devices: dict[str, list[Event]] = defaultdict(list)
    for event in events:
        if low <= event.begin_us <= high and event.arguments is not None:
            devices[_device(event.arguments)].append(event)
    order = sorted(devices, key=lambda device: (device == "cpu", len(device), device))
    return tuple(_timeline(device, devices[device], window) for device in order)


def _device(arguments: Mapping[str, Any]) -> str:
    if arguments.get("Device Type", _CPU_TYPE) == _CPU_TYPE:
        return "cpu"
    return str(arguments.get("Device Id"))[:20]


def _timeline(device: str, events: list[Event], window: Interval) -> MemoryTimeline:
    # Of events at one instant the larger total comes last, whatever their order in the file.
    events.sort(key=lambda e: (e.begin_us, _bytes(e, "Total Allocated") or 0))
    allocated = [(e.begin_us, a) for e in events if (a := _bytes(e, "Total Allocated")) is not None]
    reserved = [r for e in events if (r := _bytes(e, "Total Reserved")) is not None]
    return MemoryTimeline(
        device=device,
        allocations=sum((_bytes(e, "Bytes") or 0) > 0 for e in events),
        allocated_peak_bytes=max((a for _, a in allocated), default=None),
        reserved_peak_bytes=max(reserved, default=0) or None,
        growth_bytes=allocated[-1][1] - allocated[0][1] if allocated else None,
        points=_points(events, window),
    )


def _points(events: list[Event], window: Interval) -> tuple[tuple[float, int, int | None], ...]:
    low, high = window
    stretch_us = (high - low) / POINTS or 1.0
    peaks: dict[int, tuple[float, int, int | None]] = {}
    for event in sorted(events, key=attrgetter("begin_us")):
        allocated = _bytes(event, "Total Allocated")
        if allocated is None:
            continue
        index = min(POINTS - 1, int((event.begin_us - low) / stretch_us))
        if index not in peaks or allocated > peaks[index][1]:
            reserved = _bytes(event, "Total Reserved")
            peaks[index] = (event.begin_us - low, allocated, reserved)
    return tuple(peaks[index] for index in sorted(peaks))


def _bytes(event: Event, key: str) -> int | None:
    value = event.arguments.get(key) if event.arguments else None
    return value if isinstance(value, int) and not isinstance(value, bool) else None
