"""What `hang` remembers of a job: when which rank stepped, and what a step takes."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass, field

from warpwatch_detection.detector import NEVER
from warpwatch_detection.detectors.idleness import JobActivity
from warpwatch_detection.signals.medians import median
from warpwatch_telemetry.records import Step

# Steps whose median is the job's step time now.
RECENT_STEPS = 64
# Steps that are counted together; their durations are much alike.
COUNT_STEPS = 256
# Buckets of step times, each 2 % wide: their median is known to that.
BUCKET = math.log(1.02)


@dataclass(slots=True)
class JobProgress:
    """last, step: per live rank time and number of its newest step; a rank counts from its first.

    durations_s: of the newest steps, RECENT_STEPS and those that are not counted yet; counts: of
    all steps, by bucket, but for the last ``steps % COUNT_STEPS``.
    stopped: ranks without a heartbeat, since when. busy: those of them that may be in a call.
    check_time: when the job is looked at again; lenient: the next step may bring it nearer.
    rested: it hangs because nothing of it moves. longest_rest_s: such a rest that was over by
    itself.

    paused: ranks that have not gone on since a hang, and their last step before it; pause_s: the
    longest of it so far; broken: somebody was stopped or went. longest_pause_s: of the hangs that
    were over by themselves.
    """

    last: dict[int, float] = field(default_factory=dict)
    step: dict[int, int] = field(default_factory=dict)
    stopped: dict[int, float] = field(default_factory=dict)
    busy: set[int] = field(default_factory=set)
    durations_s: list[float] = field(default_factory=list)
    counts: dict[int, int] = field(default_factory=dict)
    steps: int = 0
    longest_gap_s: float = 0.0
    longest_rest_s: float = 0.0
    rested: bool = False
    quiet_until: float = 0.0
    hung: set[int] = field(default_factory=set)
    paused: dict[int, float] = field(default_factory=dict)
    pause_s: float = 0.0
    broken: bool = False
    longest_pause_s: float = 0.0
    check_time: float = NEVER
    lenient: bool = False
    activity: JobActivity = field(default_factory=JobActivity)

    def remove(self, rank: int) -> None:
        self.last.pop(rank, None)
        self.step.pop(rank, None)
        self.stopped.pop(rank, None)
        self.busy.discard(rank)
        self.hung.discard(rank)
        self.broken = True
        self.paused.pop(rank, None)
        self.activity.gone(rank)

    @property
    def recent_s(self) -> list[float]:
        """Of the newest steps."""
        return self.durations_s[-RECENT_STEPS:]

    def add(self, seen: Step) -> None:
        self.last[seen.rank], self.step[seen.rank] = seen.time, seen.step
        self.durations_s.append(seen.duration_s)
        self.steps += 1
        if self.steps % COUNT_STEPS == 0:
            self.count()

    def count(self) -> None:
        """After every COUNT_STEPS steps."""
        self.counts = _counted(self.counts, self.durations_s[-COUNT_STEPS:])
        self.durations_s = self.recent_s

    def typical_s(self) -> float:
        """The median step, now or over the whole run: the lesser, as either may have changed."""
        if not self.durations_s:
            return 0.0
        uncounted = self.steps % COUNT_STEPS
        counts = _counted(self.counts, self.durations_s[len(self.durations_s) - uncounted :])
        below = 0
        for bucket in sorted(counts):
            below += counts[bucket]
            if 2 * below >= self.steps:
                return min(median(self.recent_s), math.exp((bucket + 0.5) * BUCKET))
        return median(self.recent_s)

    def unresponsive(self) -> list[int]:
        """Ranks whose process cannot go on, as far as it is known."""
        return [rank for rank in self.stopped if rank in self.step and rank not in self.busy]

    def pause(self) -> None:
        """A hang is told, maybe again, since more is known of it; before ``hung`` is set."""
        self.broken = bool(self.unresponsive()) or (self.broken and bool(self.hung))
        self.paused = dict(self.last)
        self.pause_s = 0.0

    def go_on(self, rank: int, now: float, in_order: bool) -> None:
        """A step after a hang. in_order: none is missing before it, and nothing excuses the gap.

        Once is an accident. What all ranks come back from a second time is the job's habit.
        """
        begin = self.paused.pop(rank, None)
        if begin is None:
            return
        self.broken = self.broken or not in_order
        self.pause_s = max(self.pause_s, now - begin)
        if self.paused or self.broken:
            return
        habit_s = min(self.pause_s, self.longest_pause_s)
        self.longest_gap_s = max(self.longest_gap_s, habit_s)
        self.longest_pause_s = max(self.longest_pause_s, self.pause_s)

    def restart(self) -> None:
        """The program runs anew: it compiles and warms up again."""
        self.steps = 0
        self.durations_s.clear()
        self.counts.clear()

    def culprit(self) -> int | None:
        """The one process that does not respond, or the only rank behind all of its peers."""
        stopped = [rank for rank in self.stopped if rank in self.step]
        if stopped:
            return stopped[0] if len(stopped) == 1 else None
        behind = min(self.step.values())
        last = [rank for rank, step in self.step.items() if step == behind]
        ahead = all(step > behind for rank, step in self.step.items() if rank != last[0])
        return last[0] if len(last) == 1 and ahead else None


def _counted(counts: dict[int, int], durations_s: list[float]) -> dict[int, int]:
    """``counts`` and besides, in their buckets, ``durations_s``."""
    counted, ordered, begin = dict(counts), sorted(durations_s), 0
    while begin < len(ordered):
        bucket = _bucket(ordered[begin])
        end = bisect_right(ordered, bucket, lo=begin, key=_bucket)
        counted[bucket] = counted.get(bucket, 0) + end - begin
        begin = end
    return counted


def _bucket(duration_s: float) -> int:
    return math.floor(math.log(duration_s if duration_s > 1e-6 else 1e-6) / BUCKET)
