"""Detects pauses of Python's garbage collector: each stops one process, and so the job.

The shim reports long pauses, which count if they cost a share of the time. In step times alone, one
rank is slow at equal gaps while its peers wait.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from warpwatch_detection.detector import (
    NEVER,
    WARMUP_STEPS,
    DetectorStatus,
    JobStep,
    Nearest,
    Results,
    StepsDetector,
    changed,
    detail_number,
    job_found,
    job_status,
)
from warpwatch_detection.signals import peers
from warpwatch_detection.signals.peers import WorkScaling
from warpwatch_telemetry.anomalies import Detected
from warpwatch_telemetry.jobs import JobId
from warpwatch_telemetry.records import RankEvent

# Pauses decay within this time, or within this many steps if they take longer.
WINDOW_S = 60.0
WINDOW_STEPS = 150
# The decayed count must reach this: a single full collection is normal.
MIN_COUNT = 3
# From this share of the time on a diagnosis reports them as costly.
MIN_SHARE = 0.01
# Below this count the pauses are past.
LEAST_COUNT = 0.3


@dataclass(slots=True)
class ReportedPauses:
    """The pauses of one rank that the shim reports.

    lost_s, count: duration and number of the pauses, decayed to ``time``. share: their part of the
    time. excess: the share over its limit (1 at the limit), reduced while there are few pauses.
    """

    time: float = 0.0
    lost_s: float = 0.0
    count: float = 0.0
    share: float = 0.0
    on: bool = False
    begin_step: int = 0
    excess: float = 0.0
    nearest: float = 0.0

    @property
    def recent(self) -> bool:
        return self.count > 0

    def add(self, time: float, duration_s: float, step: int, window_s: float) -> None:
        """Add a pause in ``step``; -1 if the step is unknown."""
        self._decay(time, window_s)
        if not self.on and self.count < 1:
            self.begin_step = max(step, 0)
        self.lost_s += duration_s
        self.count += 1

    def evaluate(self, now: float, elapsed_s: float, window_s: float) -> None:
        """Evaluate the share of pauses. ``elapsed_s``: the time since pauses are counted."""
        self._decay(now, window_s)
        # Time decays like the pauses: this much of it still counts.
        window_s *= -math.expm1(-max(elapsed_s, 1e-3) / window_s)
        self.share = min(self.lost_s / max(window_s, WINDOW_S / 4), 1.0)
        self.excess = self.share / MIN_SHARE * min(1, self.count / MIN_COUNT)
        self.nearest = max(self.nearest, self.excess)
        if self.count >= MIN_COUNT and self.share >= MIN_SHARE:
            self.on = True
        elif self.share < MIN_SHARE / 2 or self.count < LEAST_COUNT:
            self.on = False

    def _decay(self, now: float, window_s: float) -> None:
        passed_s = max(0.0, now - self.time)
        self.time = max(now, self.time)
        kept = math.exp(-passed_s / window_s)
        self.lost_s *= kept
        self.count *= kept
        if self.count < LEAST_COUNT:
            self.lost_s = self.count = 0.0


# The least noise of the log ratio of a single step.
MIN_SCALE = 0.005
# Weight of a new step in the usual ratio and its noise; early steps are learned faster.
WEIGHT = 0.02
# A larger difference is learned as this many times the noise.
WINSOR = 3.0
# A mean of cut absolute values, normally distributed, times this is their standard deviation.
SIGMA_PER_MEAN = 1.2533
# A slow step is 8 % and six deviations above the rank's usual ratio.
MIN_RISE = math.log(1.08)
NOISE_FACTOR = 6.0
# This many slow steps in a row are a new level of the rank, not a pause.
LEVEL_STEPS = 4
# The usual ratio is known after this many steps.
READY_STEPS = 50
# A full collection of about ten million objects takes this long.
MAX_PAUSE_S = 5.0
# The newest pauses are kept. A chain has at least MIN_PAUSES: fewer may be equally far apart by
# chance.
MAX_PAUSES = 24
MIN_PAUSES = 4
# A shorter period is a slow rank; a longer one is that of checkpoints and evaluations.
MIN_PERIOD_STEPS, MAX_PERIOD_STEPS = 5, 80
# The pauses that a chain may lack: one in a checkpoint is not detected.
MAX_MISSING = 1
# Gaps count as equal if they differ by at most one step, or by this part of the period.
GAP_TOLERANCE = 0.03
# Pauses of one collector are alike: the longest is at most this many times the shortest.
MAX_SIZE_RATIO = 3.0
# After this many periods without a pause the chain is over.
SILENT_PERIODS = 3
# A script that logs or writes regularly does so at multiples of this.
ROUND_STEPS = 10


@dataclass(slots=True)
class RegularPauses:
    """One rank's chain of pauses at equal gaps, from its slow steps.

    known: the number of steps. center, scale: the usual log ratio to its peers, and its noise.
    run: the slow steps in a row. pending_step, pending_s: the newest of these, which may be a
    pause. steps, pauses_s: the newest pauses, oldest first. period, begin_step, pause_s: the gap in
    steps (0 without a chain), the start and the mean pause of the chain that was found.
    """

    known: int = 0
    center: float = 0.0
    scale: float = 0.0
    run: int = 0
    pending_step: int = 0
    pending_s: float = 0.0
    steps: list[int] = field(default_factory=list)
    pauses_s: list[float] = field(default_factory=list)
    period: int = 0
    begin_step: int = 0
    pause_s: float = 0.0
    longest_chain: int = 0
    longest_chain_step: int | None = None

    def add(self, step: int, ratio: float, compute_s: float, rate: float) -> bool:
        """Add a step. Return whether it ended a pause that continues a chain.

        rate: the chains per step that random pauses may form.
        """
        self.known += 1
        if self.known == 1:
            self.center = ratio
        rise, scale = ratio - self.center, max(self.scale, MIN_SCALE)
        weight, size = max(WEIGHT, 1 / self.known), min(abs(rise), WINSOR * scale)
        self.center += math.copysign(weight * size, rise)
        self.scale += weight * (SIGMA_PER_MEAN * size - self.scale)
        if rise > MIN_RISE and rise > NOISE_FACTOR * scale and self.known > READY_STEPS:
            self.run += 1
            self.pending_step, self.pending_s = step, -math.expm1(-rise) * compute_s
            if self.run >= LEVEL_STEPS:
                self.center, self.run = ratio, 0
            return False
        if self.period and step - self.steps[-1] > SILENT_PERIODS * self.period:
            self.period = 0
        if not self.run:
            return False
        is_single, self.run = self.run == 1, 0
        return is_single and self.pending_s <= MAX_PAUSE_S and self._add_pause(rate)

    def _add_pause(self, rate: float) -> bool:
        """Add the pending step as a pause. Return whether it continues a chain."""
        self.steps = [*self.steps[1 - MAX_PAUSES :], self.pending_step]
        self.pauses_s = [*self.pauses_s[1 - MAX_PAUSES :], self.pending_s]
        for before in range(len(self.steps) - 2, -1, -1):
            period = self.steps[-1] - self.steps[before]
            if period > MAX_PERIOD_STEPS:
                break
            if period >= MIN_PERIOD_STEPS and self._is_chain(period, rate):
                return True
        return False

    def _is_chain(self, period: int, rate: float) -> bool:
        chain = self._chain(period)
        if len(chain) > self.longest_chain:
            self.longest_chain, self.longest_chain_step = len(chain), self.steps[-1]
        if len(chain) < MIN_PAUSES:
            return False
        sizes = [self.pauses_s[place] for place in chain]
        steps = [self.steps[place] for place in chain]
        if max(sizes) > MAX_SIZE_RATIO * min(sizes) or self._chance(steps, period) > rate:
            return False
        if self.period == 0:
            self.begin_step = steps[-1]
        self.period, self.pause_s = period, sum(sizes) / len(sizes)
        return True

    def _chance(self, chain: Sequence[int], period: int) -> float:
        """Return how many such chains per step the same number of random pauses would form.

        The rate of random pauses is that of the pauses outside the chain. The first gap is
        arbitrary and sets the period; all further pauses but one must hit it.
        """
        full = len(self.steps) >= MAX_PAUSES
        observed = self.steps[-1] - self.steps[0] if full else self.known
        rate = (len(self.steps) - len(chain) + 1) / max(observed, 1)
        hit = min(1.0, rate * (2 * _tolerance(period) + 1))
        slots = round((chain[0] - chain[-1]) / period) - 1
        return float(rate * rate * period * max(slots, 1) * hit ** (len(chain) - 2))

    def _chain(self, period: int) -> list[int]:
        """Return the indices of the pauses that are one period apart, newest first."""
        tolerance = _tolerance(period)
        chain, missing = [len(self.steps) - 1], 0
        expected = self.steps[-1] - period
        for place in range(len(self.steps) - 2, -1, -1):
            step = self.steps[place]
            while step < expected - tolerance and missing < MAX_MISSING:
                missing += 1
                expected -= period
            if step < expected - tolerance:
                break
            if step <= expected + tolerance:
                chain.append(place)
                expected = step - period
        return chain

    def is_planned(self) -> bool:
        """Return whether the pauses are at round steps, as those of a script that logs."""
        chain = [self.steps[place] for place in self._chain(self.period)]
        return self.period % ROUND_STEPS == 0 and (
            all(step % self.period == 0 for step in chain)
            or all((step + 1) % self.period == 0 for step in chain)
        )


def _tolerance(period: int) -> int:
    return max(1, int(GAP_TOLERANCE * period))


# Weight of a new step in the job's usual step time.
STEP_WEIGHT = 0.02
# If the pauses of one rank are reported, ranks above this part of the limit pause too.
JOINT_EXCESS = 0.6
# Ranks are checked every AGE_STEPS; a rank that misses FORGET_STEPS left the job.
AGE_STEPS = 10
FORGET_STEPS = 1000


@dataclass(slots=True)
class RankPauses:
    """The pauses of a rank: regular ones in its steps, and those that the shim reported."""

    index: int = 0
    reported: ReportedPauses = field(default_factory=ReportedPauses)
    regular: RegularPauses = field(default_factory=RegularPauses)
    regular_on: bool = False

    @property
    def on(self) -> bool:
        return self.regular_on or self.reported.on

    def decide_regular(self, number: int, found: bool) -> bool:
        """Decide whether rank ``number`` has regular pauses. Return whether this pause counts.

        found: whether the pause continues a chain.
        """
        if self.reported.recent:
            # The shim's reports are more certain.
            self.regular_on = False
        elif found:
            self.regular_on = not (number == 0 and self.regular.is_planned())
        elif self.regular.period == 0:
            self.regular_on = False
        return found and self.regular_on


@dataclass(slots=True)
class JobPauses:
    """The pauses of a job's ranks, counted since ``begin_time``. on: the ranks that are found."""

    ranks: dict[int, RankPauses] = field(default_factory=dict)
    scaling: WorkScaling = field(default_factory=WorkScaling)
    index: int = -1
    begin_time: float = 0.0
    step_s: float = 0.0
    on: tuple[int, ...] = ()

    @property
    def window_s(self) -> float:
        return max(WINDOW_S, WINDOW_STEPS * self.step_s)

    def learn_step(self, seen: JobStep) -> None:
        if self.begin_time == 0.0:
            self.begin_time, self.step_s = seen.time, seen.duration_s
        cut_s = min(seen.duration_s, 2.0 * self.step_s)
        self.step_s += STEP_WEIGHT * (cut_s - self.step_s)

    def cost(self, rank: RankPauses) -> float:
        """Return the share of the time that the rank's pauses take."""
        if rank.reported.on:
            return rank.reported.share
        between_s = max(1, rank.regular.period) * self.step_s
        return rank.regular.pause_s / between_s if between_s > 0 else 0.0


class GcPause(StepsDetector[JobPauses]):
    kind = "gc_pause"
    reads = (JobStep, RankEvent)
    state_of = JobPauses

    def observe(self, seen: Any) -> Results:
        if isinstance(seen, RankEvent):
            return self._event(seen) if seen.event == "gc_pause" else ()
        return super().observe(seen)

    def evaluate(self, job: JobPauses, seen: JobStep) -> Results:
        if seen.index < WARMUP_STEPS:
            return ()
        job.learn_step(seen)
        touched, news = self._add_step(job, seen)
        if job.index % AGE_STEPS == 0:
            touched |= self._age(job, seen)
        if not (touched or job.on):
            return ()
        return self._results(job, seen.job_id, seen.time, seen.step, news)

    def _event(self, seen: RankEvent) -> Results:
        job = self.state.jobs.get(seen.job_id)
        duration_s, step = detail_number(seen, "duration_s"), detail_number(seen, "step")
        if job is None or job.begin_time == 0.0 or duration_s is None or duration_s < 0:
            return ()
        rank = job.ranks.setdefault(seen.rank, RankPauses(job.index))
        began = -1 if step is None else int(step)
        rank.reported.add(seen.time, duration_s, began, job.window_s)
        rank.reported.evaluate(seen.time, seen.time - job.begin_time, job.window_s)
        return self._results(job, seen.job_id, seen.time, max(began, 0), news=rank.reported.on)

    def _add_step(self, job: JobPauses, seen: JobStep) -> tuple[bool, bool]:
        """Return whether a rank may have changed, and whether a regular pause counts."""
        touched = news = False
        if len(seen.compute_s) < 2:
            return touched, news
        rate = self._rate_per_s * job.step_s / len(seen.compute_s)
        for number, ratio in peers.compare(seen, job.scaling, {}).ratios.items():
            rank = job.ranks.get(number) or job.ranks.setdefault(number, RankPauses(job.index))
            found = rank.regular.add(seen.step, ratio, seen.compute_s[number], rate)
            if found or rank.regular_on:
                touched = True
                news |= rank.decide_regular(number, found)
        return touched, news

    def _age(self, job: JobPauses, seen: JobStep) -> bool:
        """Decay reported pauses, and forget ranks that left. Return whether anything changed."""
        for number in seen.compute_s.keys() & job.ranks.keys():
            job.ranks[number].index = job.index
        reported = [rank for rank in job.ranks.values() if rank.reported.recent]
        for rank in reported:
            rank.reported.evaluate(seen.time, seen.time - job.begin_time, job.window_s)
        gone = [n for n, rank in job.ranks.items() if job.index - rank.index > FORGET_STEPS]
        for number in gone:
            del job.ranks[number]
        return bool(reported or gone)

    def _results(self, job: JobPauses, name: JobId, time: float, step: int, news: bool) -> Results:
        """Return the results after a pause or step. news: whether a pause counts."""
        joint = any(rank.reported.on for rank in job.ranks.values())
        least = JOINT_EXCESS if joint else NEVER
        on = tuple(n for n, rank in job.ranks.items() if rank.on or rank.reported.excess >= least)
        was_on, job.on = job.on, on
        if on and on == was_on and not news:
            return ()
        found = self._found(job, name, time, step) if on else None
        return changed(name, time, was_on, found)

    @staticmethod
    def _found(job: JobPauses, name: JobId, time: float, step: int) -> Detected:
        worst = max(job.on, key=lambda number: job.cost(job.ranks[number]))
        rank, alone = job.ranks[worst], len(job.on) == 1
        cost = job.cost(rank)
        who = f"rank {worst}" if alone else f"each of {len(job.on)} ranks"
        if rank.reported.on:
            begin, pause_s = rank.reported.begin_step, rank.reported.lost_s / rank.reported.count
            what = f"garbage collection stops {who} for {1000 * pause_s:.0f} ms at a time"
        else:
            begin, pause_s = rank.regular.begin_step, rank.regular.pause_s
            what = (
                f"{who} pauses {1000 * pause_s:.0f} ms every {rank.regular.period} steps, as "
                f"garbage collection does"
            )
        text = f"{what}, {100 * cost:.1f} % of the time, since step {begin}"
        named = worst if alone else None
        return job_found(name, time, text, cost, 0.0, rank=named, step=step, begin_step=begin)

    def statuses(self) -> Iterable[DetectorStatus]:
        for name, job in self.state.jobs.items():
            if not job.ranks:
                text = "one rank has no peers, and no pause was reported"
                yield job_status(name, False, text, learns=True)
            for number, rank in job.ranks.items():
                regular, reported = rank.regular, rank.reported
                text = (
                    f"reported pauses of rank {number} take {100 * reported.share:.2f} % of the "
                    f"time, limit {100 * MIN_SHARE:.0f} %; {regular.longest_chain} slow steps at "
                    f"equal gaps, limit {MIN_PAUSES}"
                )
                chain, share = regular.longest_chain / MIN_PAUSES, reported.share
                nearest = max(reported.nearest, chain, share / MIN_SHARE)
                near = Nearest(nearest, regular.longest_chain_step)
                more = {"learns": not (regular.known or reported.recent), "rank": number}
                yield job_status(name, rank.on, text, share, MIN_SHARE, near, baseline=0.0, **more)
