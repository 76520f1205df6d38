"""Sums copies and memsets of the device by direction and kind of host memory."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from warpwatch_diagnosis.measures.intervals import (
    Interval,
    Intervals,
    clip,
    difference,
    total,
    union,
)
from warpwatch_diagnosis.trace.events import TraceEvent

Direction = Literal["HtoD", "DtoH", "DtoD", "PtoP", "HtoH", "memset", "unknown"]
HostMemory = Literal["pageable", "pinned"]

# A copy this small carries a value that the host wants to see (reference: DtoH of at most 64 B).
SCALAR_BYTES = 64
_PATTERNS: tuple[tuple[Direction, str], ...] = (
    ("memset", r"memset"),
    ("HtoD", r"HtoD|HostToDevice|Host ?-> ?Device"),
    ("DtoH", r"DtoH|DeviceToHost|Device ?-> ?Host"),
    ("PtoP", r"PtoP|PeerToPeer"),
    ("DtoD", r"DtoD|DeviceToDevice|Device ?-> ?Device"),
    ("HtoH", r"HtoH|HostToHost"),
)
_DIRECTIONS = tuple((known, re.compile(p, re.IGNORECASE)) for known, p in _PATTERNS)


@lru_cache(maxsize=1024)
def copy_kind(name: str) -> tuple[Direction, HostMemory | None]:
    """Return direction and host memory by the profiler's name of a copy."""
    direction: Direction = next((known for known, p in _DIRECTIONS if p.search(name)), "unknown")
    memories: tuple[HostMemory, ...] = ("pageable", "pinned")
    return direction, next((memory for memory in memories if memory in name.lower()), None)


@dataclass(frozen=True, slots=True)
class CopyTime:
    """All copies of one direction and kind of host memory in the window.

    memory: host memory; None without or if unknown. total_us: sum of durations; busy_us: their
    union; exposed_us: the part of the union that no kernel hides. bytes: None if no copy has a
    size. small_count: copies of at most SCALAR_BYTES. bandwidth_gb_per_s: whole copies, also those
    that the window cuts; 1 GB = 1e9 bytes.
    """

    direction: Direction
    memory: HostMemory | None
    count: int
    bytes: int | None
    total_us: float
    busy_us: float
    exposed_us: float
    small_count: int
    bandwidth_gb_per_s: float | None


def copy_times(
    copies: Sequence[TraceEvent], kernels: Intervals, window: Interval
) -> tuple[CopyTime, ...]:
    """Return the copies, longest first; ``kernels`` is the union of what may hide them."""
    kinds: dict[tuple[Direction, HostMemory | None], list[TraceEvent]] = defaultdict(list)
    for copy in copies:
        kinds[copy_kind(copy.name)].append(copy)
    times = [_copy_time(key, found, kernels, window) for key, found in kinds.items()]
    return tuple(sorted(times, key=lambda t: (-t.total_us, t.direction, t.memory or "")))


def _copy_time(
    key: tuple[Direction, HostMemory | None],
    copies: list[TraceEvent],
    kernels: Intervals,
    window: Interval,
) -> CopyTime:
    spans = list(clip(((c.begin_us, c.end_us) for c in copies), window))
    busy = union(spans)
    sized = [(size, c) for c in copies if (size := c.number("bytes")) is not None]
    sizes = [size for size, _ in sized]
    copying_us = math.fsum(c.end_us - c.begin_us for _, c in sized)
    return CopyTime(
        direction=key[0],
        memory=key[1],
        count=len(copies),
        bytes=int(sum(sizes)) if sizes else None,
        total_us=total(sorted(spans)),
        busy_us=total(busy),
        exposed_us=total(difference(busy, kernels)),
        small_count=sum(size <= SCALAR_BYTES for size in sizes),
        bandwidth_gb_per_s=sum(sizes) / copying_us / 1e3 if sum(sizes) and copying_us else None,
    )
