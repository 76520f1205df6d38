"""Counts the content of a trace while it is read, without keeping an event."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from warpwatch_diagnosis.trace.events import KINDS, Kind, is_time
from warpwatch_diagnosis.trace.files import TraceSource
from warpwatch_diagnosis.trace.reader import EVENTS, HEAD, members

# No capture has more steps; further ones are not listed.
MAX_STEPS = 1000
_STEP = re.compile(r"ProfilerStep#(\d{1,18})")


@dataclass(slots=True)
class TraceInventory:
    """The content of a trace; times are in µs of its own clock.

    listed: all elements. counts: events with a time, by kind. untimed: events of these kinds
    without a time, or with an impossible one (at or before 0). steps: begin and end of each
    ``ProfilerStep#``. begin_us, end_us: the span of all timed events. rank: from the metadata, or
    None. sees_gpu: the profiler found a GPU.
    """

    listed: int = 0
    counts: Counter[Kind] = field(default_factory=Counter)
    untimed: int = 0
    steps: dict[int, tuple[float, float]] = field(default_factory=dict)
    begin_us: float | None = None
    end_us: float | None = None
    rank: int | None = None
    sees_gpu: bool = False


def take_inventory(path: TraceSource) -> TraceInventory:
    """Count the events of a file. Raises TraceError if it is not a whole trace."""
    inventory = TraceInventory()
    head: dict[str, Any] = {}
    for key, value in members(path):
        if key in HEAD:
            head[key] = value
        if key != EVENTS:
            continue
        inventory.listed += len(value)
        for event in value:
            if isinstance(event, dict) and event.get("ph") == "X":
                _count(inventory, event)
    inventory.rank = _rank(head)
    inventory.sees_gpu = bool(head.get("deviceProperties"))
    return inventory


def _count(inventory: TraceInventory, event: dict[str, Any]) -> None:
    category, name = event.get("cat"), event.get("name")
    kind = KINDS.get(category) if isinstance(category, str) else None
    if kind is None:
        return
    begin, duration = event.get("ts"), event.get("dur")
    if not is_time(begin) or not is_time(duration) or not begin:
        inventory.untimed += 1
        return
    begin_us = float(begin)
    end_us = begin_us + duration
    inventory.counts[kind] += 1
    inventory.begin_us = min(begin_us, inventory.begin_us or begin_us)
    inventory.end_us = max(end_us, inventory.end_us or end_us)
    if kind in ("annotation", "operator") and isinstance(name, str):
        step = _STEP.fullmatch(name)
        if step and len(inventory.steps) < MAX_STEPS:
            inventory.steps[int(step[1])] = (begin_us, end_us)


def _rank(head: dict[str, Any]) -> int | None:
    for key in ("warpwatch", "distributedInfo"):
        about = head.get(key)
        rank = about.get("rank") if isinstance(about, dict) else None
        if isinstance(rank, int) and not isinstance(rank, bool):
            return rank
    return None
