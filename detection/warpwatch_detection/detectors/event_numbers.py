"""Numbers in the free-form detail of events. What a process says of itself is a claim."""

from __future__ import annotations

from warpwatch_telemetry.records import RankEvent

# Far above every count and duration, and far below where arithmetic with floats ends.
MAX_NUMBER = 1e30


def detail_number(event: RankEvent, name: str) -> float | None:
    """A number of an event's detail; None for what is none, is not finite or beyond MAX_NUMBER."""
    value = event.detail.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) <= MAX_NUMBER else None
