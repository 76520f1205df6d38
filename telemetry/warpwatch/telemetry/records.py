"""What happens, in order of time. The telemetry log is the JSON form of these records.

Times are wall clock in seconds, durations in seconds, memory in bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from warpwatch.telemetry.metric import SeriesKey


@dataclass(frozen=True, slots=True)
class RankSeen:
    """A rank reported for the first time."""

    time: float
    job: str
    rank: int
    world_size: int = 1
    device: str | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """One finished optimizer step of one rank. Phases are disjoint; the remainder is ``other``.

    profiled: it ran under the profiler, or paid for starting it or for its export.
    """

    time: float
    job: str
    rank: int
    step: int
    duration_s: float
    gpu_s: float | None = None
    phases_s: Mapping[str, float] = field(default_factory=dict)
    memory_allocated_bytes: int | None = None
    samples: int = 0
    tokens: int = 0
    profiled: bool = False


@dataclass(frozen=True, slots=True)
class DeviceReading:
    """The values of one device at one time."""

    time: float
    device: str
    metrics: Mapping[SeriesKey, float]
    up: bool = True
    reason: str = ""


@dataclass(frozen=True, slots=True)
class RankEvent:
    """Something that happened to a rank. ``event`` is one of EVENTS; ``detail`` is free of form."""

    time: float
    job: str
    rank: int
    event: str
    detail: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Clock:
    """Time passed and nothing arrived."""

    time: float


@dataclass(frozen=True, slots=True)
class End:
    """The rank (or, without a rank, the whole job) ended in order."""

    time: float
    job: str
    rank: int | None = None


Record = RankSeen | Step | DeviceReading | RankEvent | Clock | End

# From the shim: capture_* , exception, oom, gc_pause (with duration_s, generation, step), memory
# (what its allocator says: allocated_bytes, reserved_bytes, peak_allocated_bytes,
# inactive_split_bytes, allocation_retries, out_of_memory_errors). From the daemon, which sees the
# process: stopped (alive without a heartbeat, with silent_reason), resumed, died (gone without an
# exit record; oom_kill where the kernel ended it for want of memory), process (now and then what
# /proc and its control groups say: cpu_s, io_bytes, disk_wait, anonymous_bytes, available_bytes,
# limit_bytes). What is not known is left out of the detail.
EVENTS = frozenset(
    {
        "capture_armed",
        "capture_late",
        "capture_started",
        "capture_finished",
        "capture_failed",
        "capture_disarmed",
        "exception",
        "oom",
        "gc_pause",
        "memory",
        "process",
        "stopped",
        "resumed",
        "died",
    }
)
