"""Whether a symptom of a device lasts, and how a counter of it grows."""

from __future__ import annotations

from dataclasses import dataclass, field

from warpwatch_detection.detector import NEVER

# A pause between two judgements is no evidence that something lasted: at least this long, and
# three times the pause before.
GAP_S = 60.0
# Below this part of its limit a symptom is gone; between it and the limit nothing changes.
RELEASE = 0.5
# A window is cut into so many parts: its memory.
WINDOW_PARTS = 10
# Readings that are more windows apart than this have nothing to do with each other.
MOST_WINDOWS = 10


@dataclass(frozen=True, slots=True)
class Symptom:
    """One judgement. ``excess``: how far it is, 1 at the limit; the rest as in a Detected."""

    excess: float
    value: float | None = None
    baseline: float | None = None
    limit: float | None = None


@dataclass(slots=True)
class Hysteresis:
    """Whether a symptom lasts: found after ``hold_s`` at its limit, over after ``clear_s`` below
    RELEASE. Times are of records.

    since: of the bad judgements in a row, or, once found, of the good ones.
    nearest: the largest excess so far; one at the limit counts as much as it has lasted.
    """

    found: bool = False
    since: float | None = None
    judged: float = -NEVER
    pause_s: float = 0.0
    nearest: float = 0.0
    value: float | None = None
    baseline: float | None = None
    limit: float | None = None

    def follow(self, now: float, symptom: Symptom, hold_s: float, clear_s: float) -> bool:
        """Whether the symptom is there after this judgement."""
        pause_s = now - self.judged
        if pause_s < 0 or (self.known and pause_s > max(GAP_S, 3 * self.pause_s)):
            self.since = None
        elif self.known and pause_s:
            self.pause_s = pause_s
        self.judged = now
        self.value, self.baseline, self.limit = symptom.value, symptom.baseline, symptom.limit
        lasted_s = self._lasted_s(now, symptom.excess)
        near = symptom.excess
        if near >= 1:
            near = 1.0 if self.found or lasted_s >= hold_s else lasted_s / hold_s
        self.nearest = max(self.nearest, near)
        if self.since is not None and lasted_s >= (clear_s if self.found else hold_s):
            self.found, self.since = not self.found, None
        return self.found

    def _lasted_s(self, now: float, excess: float) -> float:
        turning = excess < RELEASE if self.found else excess >= 1
        if not turning:
            self.since = None
            return 0.0
        if self.since is None:
            self.since = now
        return now - self.since

    @property
    def known(self) -> bool:
        """Whether it was ever judged."""
        return self.judged > -NEVER

    def interrupt(self) -> None:
        """What was bad so far does not count, unless it was found."""
        if not self.found:
            self.since = None

    def end(self) -> None:
        self.found, self.since = False, None


@dataclass(slots=True)
class CounterGrowth:
    """How much a counter grew lately. What it had when it was first seen is no news.

    A counter that fell began again at 0 (the driver was loaded again): what it has is new.
    points: time and growth up to it, the oldest first; grown: since the beginning.
    """

    last: float | None = None
    grown: float = 0.0
    points: list[tuple[float, float]] = field(default_factory=list)

    def take(self, total: float) -> float:
        """The growth since the reading before."""
        before, self.last = self.last, total
        grown = 0.0 if before is None else total - before if total >= before else total
        self.grown += grown
        return grown

    def add(self, now: float, total: float, window_s: float) -> float:
        """The growth in ``window_s``: of the newest, or as a mean where readings are rarer."""
        self.take(total)
        points = self.points
        if not points or not 0 <= now - points[-1][0] <= MOST_WINDOWS * window_s:
            # What grew during a pause is not known to have grown lately.
            points[:] = [(now, self.grown)]
        elif now - points[-1][0] >= window_s / WINDOW_PARTS:
            points.append((now, self.grown))
        while len(points) > 1 and points[1][0] <= now - window_s:
            points.pop(0)
        time, grown = points[0]
        return (self.grown - grown) * window_s / max(window_s, now - time)
