"""What `hang` remembers of a job: when which rank stepped, what a step takes, and its pauses."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from statistics import median

from warpwatch_detection.detector import NEVER
from warpwatch_detection.detectors.idleness import JobActivity
from warpwatch_telemetry.records import Step

# A rank's first steps, for which ``warmup_timeout_s`` holds.
WARMUP_STEPS = 5
# Steps whose median is the job's step time now.
RECENT_STEPS = 64
# Steps that are counted together; their durations are much alike.
COUNT_STEPS = 256
# Buckets of step times, each 2 % wide: their median is known to that.
BUCKET = math.log(1.02)


@dataclass(slots=True)
class StepTimes:
    """``durations_s``: of the newest steps, RECENT_STEPS and those that are not counted yet.

    counts: of all steps, by bucket, but for the last ``steps % COUNT_STEPS``.
    """

    steps: int = 0
    durations_s: list[float] = field(default_factory=list)
    counts: dict[int, int] = field(default_factory=dict)

    def add(self, duration_s: float) -> None:
        self.durations_s.append(duration_s)
        self.steps += 1
        if self.steps % COUNT_STEPS == 0:
            self.counts = _counted(self.counts, self.durations_s[-COUNT_STEPS:])
            self.durations_s = self.recent_s

    @property
    def recent_s(self) -> list[float]:
        """Of the newest steps."""
        return self.durations_s[-RECENT_STEPS:]

    def typical_s(self) -> float:
        """The median step, now or over the whole run: the lesser, as either may have changed."""
        uncounted = self.durations_s[len(self.durations_s) - self.steps % COUNT_STEPS :]
        counts, below = _counted(self.counts, uncounted), 0
        for bucket in sorted(counts):
            below += counts[bucket]
            if 2 * below >= self.steps:
                return min(median(self.recent_s), math.exp((bucket + 0.5) * BUCKET))
        return 0.0


def _counted(counts: dict[int, int], durations_s: list[float]) -> dict[int, int]:
    """``counts`` and besides, in their buckets, ``durations_s``."""
    return dict(Counter(counts) + Counter(map(_bucket, durations_s)))


def _bucket(duration_s: float) -> int:
    return math.floor(math.log(max(duration_s, 1e-6)) / BUCKET)


@dataclass(slots=True)
class RankProgress:
    """step: its newest. time: of that, or since then of a sign that it trains all the same.

    silent_since: its heartbeat is missing.

    holds_gil: it is silent because of a call in C, which may be a long checkpoint.
    """

    time: float
    step: int
    silent_since: float | None = None
    holds_gil: bool = False

    @property
    def unresponsive_since(self) -> float | None:
        """Since when its process cannot go on, as far as it is known."""
        return None if self.holds_gil else self.silent_since


@dataclass(slots=True)
class HangEpisode:
    """A hang that was found, and how the ranks went on after it.

    waits_for: ranks without a step since; the hang is over when there are none.
    paused: all ranks without a step since, with the time of the last one before; longest_s: the
    longest pause of those that have gone on.
    is_broken: the pause says nothing of the job's habits: a process did not respond or went, or
    steps are missing.
    is_idle: it was found because nothing of the job moved.
    """

    waits_for: set[int]
    paused: dict[int, float]
    longest_s: float = 0.0
    is_broken: bool = False
    is_idle: bool = False

    def forget(self, rank: int) -> None:
        self.waits_for.discard(rank)
        self.paused.pop(rank, None)
        self.is_broken = True


@dataclass(slots=True)
class JobProgress:
    """``episode``: the newest hang, until all ranks have gone on after it.

    longest_gap_s: without a step, in health; longest_idle_s: without anything that moves, until it
    went on by itself; longest_hang_s: of the hangs that were over by themselves.
    quiet_until: what was silent before is excused.
    check_time: when the job is looked at again; limit_may_fall: the next step may bring that
    nearer.
    """

    ranks: dict[int, RankProgress] = field(default_factory=dict)
    times: StepTimes = field(default_factory=StepTimes)
    activity: JobActivity = field(default_factory=JobActivity)
    episode: HangEpisode | None = None
    longest_gap_s: float = 0.0
    longest_idle_s: float = 0.0
    longest_hang_s: float = 0.0
    quiet_until: float = 0.0
    check_time: float = NEVER
    limit_may_fall: bool = False

    @property
    def hung(self) -> bool:
        return self.episode is not None and bool(self.episode.waits_for)

    @property
    def warms_up(self) -> bool:
        return self.times.steps <= WARMUP_STEPS * len(self.ranks)

    @property
    def last_time(self) -> float:
        """Of the newest step of the rank that has been without one for longest."""
        return min(rank.time for rank in self.ranks.values())

    @property
    def newest_time(self) -> float:
        """Of the newest step of any rank."""
        return max(rank.time for rank in self.ranks.values())

    @property
    def quiet_since(self) -> float:
        """Since when a step is missing that nothing excuses."""
        return max(self.last_time, self.quiet_until)

    @property
    def silent(self) -> dict[int, RankProgress]:
        """Ranks whose heartbeat is missing."""
        return {n: rank for n, rank in self.ranks.items() if rank.silent_since is not None}

    def take(self, seen: Step, rank: RankProgress, is_excused: bool) -> None:
        """A step that is not just the next one, or the first one after a hang, of its rank."""
        gap_s, is_next = seen.time - rank.time, seen.step == rank.step + 1
        if gap_s < 0:
            self.limit_may_fall = True
        if seen.step <= rank.step - RECENT_STEPS:
            # The program was started again: it compiles and warms up again.
            self.times = StepTimes()
        episode = self.episode
        is_first = episode is not None and seen.rank in episode.paused
        # Where records are missing it is not known how long the job paused, and what an excuse or
        # a hang made long is no habit.
        if is_next and not (self.hung or is_first or is_excused):
            self.longest_gap_s = max(self.longest_gap_s, gap_s)
        if episode is not None:
            self._go_on(episode, seen, in_order=is_next and not is_excused)
            if episode.is_idle and episode.waits_for:
                self.longest_idle_s = max(self.longest_idle_s, gap_s)

    def _go_on(self, episode: HangEpisode, seen: Step, in_order: bool) -> None:
        """Once is an accident. What all ranks come back from a second time is the job's habit."""
        begin = episode.paused.pop(seen.rank, None)
        if begin is None:
            return
        episode.is_broken = episode.is_broken or not in_order
        episode.longest_s = max(episode.longest_s, seen.time - begin)
        if not episode.paused and not episode.is_broken:
            habit_s = min(episode.longest_s, self.longest_hang_s)
            self.longest_gap_s = max(self.longest_gap_s, habit_s)
            self.longest_hang_s = max(self.longest_hang_s, episode.longest_s)

    def resume(self, number: int) -> bool:
        """The rank has gone on, or its heartbeat is back. True if that ends the hang."""
        rank, episode = self.ranks[number], self.episode
        rank.silent_since, rank.holds_gil = None, False
        if episode is None:
            return False
        was_hung = self.hung
        episode.waits_for.discard(number)
        if not episode.paused:
            self.episode = None
        return was_hung and not self.hung

    def forget(self, number: int) -> bool:
        """The rank is gone. True if that ends the hang."""
        self.ranks.pop(number, None)
        self.activity.forget(number)
        was_hung = self.hung
        if self.episode is not None:
            self.episode.forget(number)
            if not self.episode.paused:
                self.episode = None
        return was_hung and not self.hung

    def hang(self, culprit: int | None, limit_s: float, now: float) -> None:
        """A hang is found, maybe again, since more is known of it."""
        before = self.episode if self.hung else None
        stuck = {number for number, rank in self.ranks.items() if rank.time + limit_s <= now}
        self.episode = HangEpisode(
            waits_for={culprit} if culprit is not None else stuck or set(self.ranks),
            paused={number: rank.time for number, rank in self.ranks.items()},
            is_broken=any(rank.unresponsive_since for rank in self.ranks.values())
            or (before is not None and before.is_broken),
            is_idle=before is not None and before.is_idle,
        )

    def culprit(self) -> int | None:
        """The one process that does not respond, or the only rank behind all of its peers."""
        silent = list(self.silent)
        if silent:
            return silent[0] if len(silent) == 1 else None
        behind = min(rank.step for rank in self.ranks.values())
        last = [number for number, rank in self.ranks.items() if rank.step == behind]
        return last[0] if len(last) == 1 else None
