"""Times of day without automatic captures, as ``triggers.quiet_hours`` writes them."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from dataclasses import dataclass

_WRITTEN = re.compile(r"(\d\d):(\d\d)\s*-\s*(\d\d):(\d\d)(\s*UTC)?")
_DAY_MIN = 24 * 60


@dataclass(frozen=True, slots=True)
class Span:
    """From ``begin_min`` until before ``end_min``, minutes of the day; over midnight if it ends
    earlier than it begins. In local time unless ``utc``.
    """

    begin_min: int
    end_min: int
    utc: bool = False

    def holds(self, now: float) -> bool:
        """``now``: wall clock in seconds."""
        clock = time.gmtime(now) if self.utc else time.localtime(now)
        minute = 60 * clock.tm_hour + clock.tm_min
        if self.begin_min < self.end_min:
            return self.begin_min <= minute < self.end_min
        return minute >= self.begin_min or minute < self.end_min


def parse(text: str) -> Span:
    """``22:00-06:00`` or ``22:00-06:00 UTC``. Raises ValueError with what would be right."""
    match = _WRITTEN.fullmatch(text.strip())
    if match is not None:
        hours, minutes = (int(match[1]), int(match[3])), (int(match[2]), int(match[4]))
        begin, end = (60 * hour + minute for hour, minute in zip(hours, minutes, strict=True))
        if max(minutes) < 60 and begin < _DAY_MIN and end <= _DAY_MIN and begin != end:
            return Span(begin, end, match[5] is not None)
    raise ValueError("expected two times of day such as 22:00-06:00 or 22:00-06:00 UTC")


def quiet(written: Iterable[str], now: float) -> str | None:
    """The first of the spans that ``now`` lies in, as it is written."""
    return next((text for text in written if parse(text).holds(now)), None)
