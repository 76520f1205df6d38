"""Whether growth takes a large share of the memory that was left when it began, however fast.

The other windows of growth wait for hundreds of steps. Here the whole of one growth is kept as a
few points, whose distance doubles as it lasts.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from warpwatch_detection.signals.trend import (
    MIN_GROWTH_BYTES,
    GrowthPoint,
    Trend,
    begin_of,
    every_part_grows,
    trend,
)

# Found if so much is gone of what was left at its begin: well below a half, and more than what a
# process loads, caches and warms up with on a host of its size.
MIN_SHARE = 0.25
# Points of a growth: with the least of them each sixth has two; with the most, every other goes.
MIN_POINTS = 12
MAX_POINTS = 24
# Points that are kept of a level that does not grow.
FLAT_POINTS = 4
# Growth of the last third against an even share of the growth; less is a level.
MIN_LAST = 0.25
# Points are at least so far apart, by time and by one step.
MIN_APART_S = 1.0
# Growth that becomes so many times as fast is another one.
FASTER = 3.0
# The ranks of one host that leak alike.
MAX_RANKS = 16


@dataclass(slots=True)
class Exhaustion:
    """``points`` of one growth, or the newest of a level.

    apart_s: seconds from one point to the next. share: of what was left at the first of them, that
    is gone. excess: share over its limit, 0 unless every part grew; nearest: the largest so far.
    begin_step: of growth that is found.
    """

    points: list[GrowthPoint] = field(default_factory=list)
    apart_s: float = MIN_APART_S
    share: float = 0.0
    excess: float = 0.0
    begin_step: int | None = None
    nearest: float | None = None
    nearest_step: int | None = None

    @property
    def grows(self) -> bool:
        return self.begin_step is not None

    def trend(self) -> Trend:
        return trend(self.points) if len(self.points) >= MIN_POINTS else Trend()

    def add(self, point: GrowthPoint, ranks: int) -> bool:
        """Take a sample in; True if that changed what is found. ``ranks``: of the job."""
        if point.left < 0 or (self.points and not self._is_due(point)):
            return False
        self.points.append(point)
        self._judge(min(ranks, MAX_RANKS))
        if len(self.points) < MIN_POINTS:
            return False
        if self._is_level():
            was, self.begin_step = self.grows, None
            self._restart(self.points[-FLAT_POINTS:])
            return was
        if len(self.points) >= MAX_POINTS:
            self.points = self.points[1::2]
            self.apart_s *= 2
        return self.grows

    def _is_due(self, point: GrowthPoint) -> bool:
        """Whether it is a point of its own; what grows much faster than before begins anew."""
        points = self.points
        last = points[-1]
        passed_s = point.time - last.time
        if point.step <= last.step or passed_s < MIN_APART_S:
            return False
        pace = (last.value - points[0].value) / max(last.time - points[0].time, MIN_APART_S)
        usual = FASTER * max(0.0, pace) * passed_s
        if len(points) > 1 and point.value - last.value > usual + MIN_GROWTH_BYTES:
            self._restart(points[-1:])
            return True
        return passed_s >= self.apart_s

    def _restart(self, points: list[GrowthPoint]) -> None:
        self.points, self.apart_s, self.excess = points, MIN_APART_S, 0.0

    def _is_level(self) -> bool:
        """Whether the last third rose by less than its part of the whole."""
        values = [point.value for point in self.points]
        grown, third = values[-1] - values[0], len(values) // 3
        return grown <= 0 or values[-1] - values[-1 - third] < MIN_LAST * grown / 3

    def _judge(self, ranks: int) -> None:
        first, last = self.points[0], self.points[-1]
        grown = last.value - first.value
        # What others took meanwhile is not this growth.
        gone = max(grown, min(first.left - last.left, ranks * grown))
        self.share = gone / (last.left + gone) if gone > 0 else 0.0
        clear = len(self.points) >= MIN_POINTS and every_part_grows(self.points)
        self.excess = self.share / MIN_SHARE if clear and self.trend().excess >= 1.0 else 0.0
        if self.nearest is None or self.excess > self.nearest:
            self.nearest, self.nearest_step = self.excess, last.step
        if self.excess >= 1.0 and self.begin_step is None:
            self.begin_step = begin_of(self.points)
