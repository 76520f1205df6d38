"""One gap of the device becomes parts with a cause each: the rules that idle describes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from warpwatch_diagnosis.measures.copies import copy_kind
from warpwatch_diagnosis.measures.idle_causes import Cause
from warpwatch_diagnosis.measures.intervals import Intervals
from warpwatch_diagnosis.trace.events import Event

# Back to back kernels of one stream follow each other within some µs; launch latency is similar.
KERNEL_GAP_US = 10.0
# Idle time that begins this soon after a wait's return is the wait's (reference of this project).
LEAD_US = 50.0
# Holistic Trace Analysis calls a launch above this an outlier: no host that merely launches.
LAUNCH_PACE_US = 50.0

# Begin, end and cause of a part of a gap.
GapPart = tuple[float, float, Cause]


class HostWait(NamedTuple):
    """The host stood still and lost its lead; in µs."""

    end_us: float
    begin_us: float
    cause: Cause


@dataclass(slots=True)
class OrderedParts:
    """Disjoint parts in order, asked for spans whose begins do not fall."""

    parts: list[GapPart]
    _first: int = 0

    def inside(self, low: float, high: float) -> tuple[list[GapPart], Intervals]:
        """What lies in the span, and the rest of it."""
        parts, index, count = self.parts, self._first, len(self.parts)
        while index < count and parts[index][1] <= low:
            index += 1
        self._first = index
        found: list[GapPart] = []
        rest: Intervals = []
        while index < count and parts[index][0] < high:
            begin, end, cause = parts[index]
            if begin > low:
                rest.append((low, begin))
            found.append((begin if begin > low else low, end if end < high else high, cause))
            low = end
            index += 1
        if low < high:
            rest.append((low, high))
        return found, rest


@dataclass(slots=True)
class GapSplitter:
    """Splits gaps, which come in order, as idle describes it.

    named, operators: what the host did, by its own name or in operators. waits: by their end.
    previous_ends: by correlation, when the launch call before it on the same thread ended.
    owed_us: idle time that the last wait explains.
    """

    named: OrderedParts
    operators: OrderedParts
    waits: Sequence[HostWait]
    previous_ends: Mapping[int | None, float]
    owed_us: float = 0.0
    owed_cause: Cause = "synchronization"
    waited_until_us: float = 0.0
    _next_wait: int = 0

    def pass_by(self, event: Event, launch: Event) -> None:
        """Work that the device did: a launch well ahead of it pays what the host owed."""
        self._take_waits(launch.begin_us)
        ahead_us = event.begin_us - launch.end_us
        if ahead_us > LEAD_US and launch.begin_us >= self.waited_until_us:
            self.owed_us = 0.0

    def split(
        self, low: float, high: float, event: Event | None, launch: Event | None
    ) -> list[GapPart]:
        """Parts in order that add up to the gap from ``low`` to ``high``."""
        if launch is not None and launch.end_us <= low and event is not None:
            return [(low, high, _queued(high - low, event.begin_us - launch.end_us))]
        parts, rest = self.named.inside(low, high)
        if launch is None and event is not None:
            return sorted(parts + [(begin, end, "unexplained") for begin, end in rest])
        until = high if launch is None else min(max(launch.begin_us, low), high)
        self._take_waits(until)
        if until == high:
            self._take_open_wait(low, high)
        owed_us = max(0.0, self.owed_us - sum(end - begin for begin, end, _ in parts))
        self.owed_us = max(0.0, self.owed_us - (high - low))
        for begin, end in rest:
            paid = min(end, begin + owed_us) if owed_us else begin
            own_end = max(paid, min(end, until))
            if begin < paid:
                owed_us -= paid - begin
                parts.append((begin, paid, self.owed_cause))
            if paid < own_end:
                parts += self._own_time(paid, own_end, launch)
            if own_end < end:
                parts.append((own_end, end, _launch_cause(event.name) if event else "launch"))
        parts.sort()
        return parts

    def _take_waits(self, until_us: float) -> None:
        """Waits that returned before ``until_us`` hold up what the host does from then on."""
        while self._next_wait < len(self.waits):
            wait = self.waits[self._next_wait]
            if wait.end_us > until_us:
                return
            self._next_wait += 1
            self.waited_until_us = wait.end_us
            if wait.end_us - wait.begin_us >= self.owed_us:
                self.owed_us = wait.end_us - wait.begin_us
                self.owed_cause = wait.cause

    def _take_open_wait(self, low: float, high: float) -> None:
        """A wait with nothing to wait for that the end of the window cuts."""
        for wait in self.waits[self._next_wait : self._next_wait + 1]:
            self.owed_us = max(self.owed_us, high - max(low, wait.begin_us))

    def _own_time(self, low: float, high: float, launch: Event | None) -> list[GapPart]:
        """What the host did up to a launch call, where nothing else has a claim; low < high."""
        before_us = self.previous_ends.get(launch.correlation) if launch is not None else None
        pace_us = launch.begin_us - before_us if launch is not None and before_us else math.inf
        if pace_us <= LAUNCH_PACE_US:
            return [(low, high, "launch")]
        parts, rest = self.operators.inside(low, high)
        return parts + [(begin, end, "host") for begin, end in rest]


def _queued(gap_us: float, delay_us: float) -> Cause:
    """Work that was launched before the gap: late by no more than a launch takes, or waiting."""
    if delay_us <= KERNEL_GAP_US:
        return "launch"
    return "kernel_gap" if gap_us <= KERNEL_GAP_US else "unexplained"


@lru_cache(maxsize=1024)
def _launch_cause(name: str) -> Cause:
    """Who pays for the launch call and the way to the device, by the name of the work."""
    lowered = name.lower()
    # Names of kernels may hold a direction by accident: group-TOP-k.
    named = "copy" in lowered and copy_kind(name)[0] not in ("memset", "unknown")
    return "copy" if named or "memcpy" in lowered else "launch"
