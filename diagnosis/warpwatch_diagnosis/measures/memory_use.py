"""Memory of each device in the window, from the [memory] events of profile_memory=True."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from warpwatch_diagnosis.measures.intervals import Interval
from warpwatch_diagnosis.trace.events import Event

# c10::DeviceType of what has no memory of its own.
_CPU_TYPE = 0


@dataclass(frozen=True, slots=True)
class AllocatorUse:
    """One device's allocator; ``device`` is "cpu" or the GPU's index.

    allocations: number of allocations; peaks in bytes, None where the trace has none (before
    PyTorch 1.12). growth_bytes: allocated at the end of the window less at its begin.
    """

    device: str
    allocations: int
    allocated_peak_bytes: int | None
    reserved_peak_bytes: int | None
    growth_bytes: int | None


def memory_use(events: Sequence[Event], window: Interval) -> tuple[AllocatorUse, ...]:
    """One for each device with [memory] events in the window, GPUs first."""
    low, high = window
    devices: dict[str, list[Event]] = defaultdict(list)
    for event in events:
        if low <= event.begin_us <= high and event.arguments is not None:
            devices[_device(event.arguments)].append(event)
    order = sorted(devices, key=lambda device: (device == "cpu", len(device), device))
    return tuple(_memory_use(device, devices[device]) for device in order)


def _device(arguments: Mapping[str, Any]) -> str:
    if arguments.get("Device Type", _CPU_TYPE) == _CPU_TYPE:
        return "cpu"
    return str(arguments.get("Device Id"))[:20]


def _memory_use(device: str, events: list[Event]) -> AllocatorUse:
    # Of events at one instant the larger total comes last, whatever their order in the file.
    events.sort(key=lambda e: (e.begin_us, e.whole("Total Allocated") or 0))
    allocated = [a for e in events if (a := e.whole("Total Allocated")) is not None]
    reserved = [r for e in events if (r := e.whole("Total Reserved")) is not None]
    return AllocatorUse(
        device=device,
        allocations=sum((e.whole("Bytes") or 0) > 0 for e in events),
        allocated_peak_bytes=max(allocated, default=None),
        reserved_peak_bytes=max(reserved, default=0) or None,
        growth_bytes=allocated[-1] - allocated[0] if allocated else None,
    )
