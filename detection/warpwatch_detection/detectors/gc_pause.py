"""Detects pauses of Python's garbage collector: each stops one process, and so the job.

The shim reports long pauses, which count if they cost a share of the time. In step times alone, one
rank is slow at equal gaps while its peers wait.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from warpwatch_detection.detector import (
    NEVER,
    WARMUP_STEPS,
    Cleared,
    DetectorStatus,
    JobDetector,
    JobStep,
    Results,
    detail_number,
)
from warpwatch_detection.signals import peers
from warpwatch_detection.signals.pauses import (
    MIN_PAUSES,
    MIN_SHARE,
    WINDOW_S,
    WINDOW_STEPS,
    RegularPauses,
    ReportedPauses,
)
from warpwatch_detection.signals.peers import WorkScaling
from warpwatch_telemetry.anomalies import Detected
from warpwatch_telemetry.jobs import JobId
from warpwatch_telemetry.records import RankEvent

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

    def judge_regular(self, number: int, found: bool) -> bool:
        """Decide about regular pauses. Return whether this pause counts.

        found: the pause continues a chain of regular ones.
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


class GcPause(JobDetector[JobPauses]):
    kind = "gc_pause"
    reads = (JobStep, RankEvent)
    job_type = JobPauses

    def observe(self, seen: Any) -> Results:
        if isinstance(seen, RankEvent):
            return self._event(seen) if seen.event == "gc_pause" else ()
        return super().observe(seen)

    def judge(self, job: JobPauses, seen: JobStep) -> Results:
        if seen.index < WARMUP_STEPS:
            return ()
        job.learn_step(seen)
        touched, news = self._judge_regular(job, seen)
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
        rank.reported.judge(seen.time, seen.time - job.begin_time, job.window_s)
        return self._results(job, seen.job_id, seen.time, max(began, 0), news=rank.reported.on)

    def _judge_regular(self, job: JobPauses, seen: JobStep) -> tuple[bool, bool]:
        """Return whether a rank may have changed, and whether a pause of the found kind came."""
        touched = news = False
        rate = self._rate_per_s * job.step_s / max(len(seen.compute_s), 1)
        if len(seen.compute_s) < 2:
            return touched, news
        for number, ratio in peers.compare(seen, job.scaling, {}).ratios.items():
            rank = job.ranks.get(number) or job.ranks.setdefault(number, RankPauses(job.index))
            found = rank.regular.add(seen.step, ratio, seen.compute_s[number], rate)
            if found or rank.regular_on:
                touched = True
                news |= rank.judge_regular(number, found)
        return touched, news

    def _age(self, job: JobPauses, seen: JobStep) -> bool:
        """Decay reported pauses, and forget ranks that left. Return whether anything changed."""
        for number in seen.compute_s.keys() & job.ranks.keys():
            job.ranks[number].index = job.index
        reported = [rank for rank in job.ranks.values() if rank.reported.recent]
        for rank in reported:
            rank.reported.judge(seen.time, seen.time - job.begin_time, job.window_s)
        gone = [n for n, rank in job.ranks.items() if job.index - rank.index > FORGET_STEPS]
        for number in gone:
            del job.ranks[number]
        return bool(reported or gone)

    def _results(self, job: JobPauses, name: JobId, time: float, step: int, news: bool) -> Results:
        """Return the results after a pause or step. news: a pause of the found kind came."""
        joint = any(rank.reported.on for rank in job.ranks.values())
        least = JOINT_EXCESS if joint else NEVER
        on = tuple(n for n, rank in job.ranks.items() if rank.on or rank.reported.excess >= least)
        was_on, job.on = job.on, on
        if not on:
            return (Cleared(time, name),) if was_on else ()
        if not news and on == was_on:
            return ()
        return (self._found(job, name, time, step),)

    @staticmethod
    def _found(job: JobPauses, name: JobId, time: float, step: int) -> Detected:
        worst = max(job.on, key=lambda number: job.cost(job.ranks[number]))
        rank, alone = job.ranks[worst], len(job.on) == 1
        cost = job.cost(rank)
        who = f"rank {worst}" if alone else f"each of {len(job.on)} ranks"
        if rank.reported.on:
            begin, pause_s = rank.reported.begin_step, rank.reported.mean_s
            what = f"garbage collection stops {who} for {1000 * pause_s:.0f} ms at a time"
        else:
            begin, pause_s = rank.regular.begin_step, rank.regular.pause_s
            what = (
                f"{who} pauses {1000 * pause_s:.0f} ms every {rank.regular.period} steps, as "
                f"garbage collection does"
            )
        return Detected(
            time=time,
            severity="warning",
            **name.fields(),
            rank=worst if alone else None,
            step=step,
            begin_step=begin,
            value=cost,
            baseline=0.0,
            summary=f"{what}, {100 * cost:.1f} % of the time, since step {begin}",
        )

    def statuses(self) -> Iterable[DetectorStatus]:
        for name, job in self.state.jobs.items():
            if not job.ranks:
                text = "one rank has no peers, and no pause was reported"
                yield DetectorStatus("learning", text, **name.fields())
            for number, rank in job.ranks.items():
                yield self._status(name, number, rank)

    def _status(self, name: JobId, number: int, rank: RankPauses) -> DetectorStatus:
        regular, reported = rank.regular, rank.reported
        chain = regular.longest_chain / MIN_PAUSES
        known = regular.known or reported.recent
        return DetectorStatus(
            "found" if rank.on else "fine" if known else "learning",
            f"reported pauses of rank {number} take {100 * reported.share:.2f} % of the time, "
            f"limit {100 * MIN_SHARE:.0f} %; {regular.longest_chain} slow steps at equal gaps, "
            f"limit {MIN_PAUSES}",
            **name.fields(),
            rank=number,
            value=reported.share,
            baseline=0.0,
            limit=MIN_SHARE,
            nearest=max(reported.nearest, chain, reported.share / MIN_SHARE),
            nearest_step=regular.longest_chain_step,
        )
