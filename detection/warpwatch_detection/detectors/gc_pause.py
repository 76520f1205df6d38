"""Pauses of Python's garbage collector, each of which stops one process, and the job with it.

Two ways to see them: the shim tells of long ones, and they count when they cost a share of the
time; or, in step times alone, one rank is slow at equal gaps while its peers wait.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from warpwatch_detection.config_ranks import GcPauseConfig
from warpwatch_detection.detector import DetectorStatus, Fine, JobDetector, JobStep, Verdict
from warpwatch_detection.detectors.event_numbers import detail_number
from warpwatch_detection.signals import peers
from warpwatch_detection.signals.regular_pauses import RegularPauses
from warpwatch_detection.signals.reported_pauses import ReportedPauses
from warpwatch_detection.signals.work_scaling import WorkScaling
from warpwatch_telemetry.anomalies import Found
from warpwatch_telemetry.records import RankEvent

# Weight of a new step in the job's usual step time.
STEP_WEIGHT = 0.02
# Beside one whose pauses were told, ranks that have reached this part of the limit pause too.
JOINT_EXCESS = 0.6
# Every so many steps somebody looks at who is there; a rank without a step for this many others
# left the job.
AGE_STEPS = 10
FORGET_STEPS = 1000


@dataclass(slots=True)
class RankPauses:
    """``regular``: seen in steps; ``told``: by the shim. on: found either way."""

    told: ReportedPauses = field(default_factory=ReportedPauses)
    regular: RegularPauses = field(default_factory=RegularPauses)
    index: int = 0
    regular_on: bool = False

    @property
    def on(self) -> bool:
        return self.regular_on or self.told.on


@dataclass(slots=True)
class JobPauses:
    ranks: dict[int, RankPauses] = field(default_factory=dict)
    scaling: WorkScaling = field(default_factory=WorkScaling)
    index: int = -1
    begin_time: float = 0.0
    step_s: float = 0.0
    on: tuple[int, ...] = ()


@dataclass(slots=True)
class GcPauseState:
    jobs: dict[str, JobPauses] = field(default_factory=dict)


class GcPause(JobDetector[JobPauses]):
    kind = "gc_pause"
    reads = (JobStep, RankEvent)

    def __init__(self, config: GcPauseConfig) -> None:
        self._config = config
        self.state = GcPauseState()

    def observe(self, seen: Any) -> Iterable[Verdict]:
        if isinstance(seen, RankEvent):
            return self._event(seen) if seen.event == "gc_pause" else ()
        return super().observe(seen)

    def begin(self) -> JobPauses:
        return JobPauses()

    def judge(self, job: JobPauses, seen: JobStep) -> Iterable[Verdict]:
        if seen.index < self._config.warmup_steps:
            return ()
        if job.begin_time == 0.0:
            job.begin_time, job.step_s = seen.time, seen.duration_s
        duration_s, usual_s = seen.duration_s, job.step_s
        most_s = 2.0 * usual_s
        job.step_s += STEP_WEIGHT * ((duration_s if duration_s < most_s else most_s) - usual_s)
        return self._steps(job, seen)

    def _event(self, seen: RankEvent) -> Iterable[Verdict]:
        job = self.state.jobs.get(seen.job)
        duration_s, step = detail_number(seen, "duration_s"), detail_number(seen, "step")
        if job is None or job.begin_time == 0.0 or duration_s is None or duration_s < 0:
            return ()
        rank = job.ranks.setdefault(seen.rank, RankPauses(index=job.index))
        began = -1 if step is None else int(step)
        rank.told.add(seen.time, duration_s, began, self._window_s(job))
        self._judge_told(job, rank, seen.time)
        return self._verdicts(job, seen.job, seen.time, max(began, 0), news=rank.told.on)

    def _window_s(self, job: JobPauses) -> float:
        return max(self._config.window_s, self._config.window_steps * job.step_s)

    def _judge_told(self, job: JobPauses, rank: RankPauses, now: float) -> None:
        rank.told.judge(now, now - job.begin_time, self._window_s(job), self._config)

    def _steps(self, job: JobPauses, seen: JobStep) -> Iterable[Verdict]:
        touched = news = False
        if len(seen.compute_s) > 1:
            ranks, step, compute_s, config = job.ranks, seen.step, seen.compute_s, self._config
            for number, ratio in peers.compare(seen, job.scaling, {}).ratios.items():
                try:
                    rank = ranks[number]
                except KeyError:
                    rank = ranks[number] = RankPauses(index=job.index)
                found = rank.regular.add(step, ratio, compute_s[number], config)
                if found or rank.regular_on:
                    touched = True
                    news |= self._judge_regular(number, rank, found)
        if job.index % AGE_STEPS == 0:
            touched |= self._age(job, seen)
        if not (touched or job.on):
            return ()
        return self._verdicts(job, seen.job, seen.time, seen.step, news)

    def _judge_regular(self, number: int, rank: RankPauses, found: bool) -> bool:
        """``found``: a pause that belongs to a chain. True if it counts."""
        regular = rank.regular
        if rank.told.recent:
            # What the shim tells is known better.
            rank.regular_on = False
        elif found:
            rank.regular_on = not (number == 0 and regular.planned())
        elif regular.period == 0:
            rank.regular_on = False
        return found and rank.regular_on

    def _age(self, job: JobPauses, seen: JobStep) -> bool:
        """Time passes for pauses that were told, and ranks that left are forgotten."""
        for number in seen.compute_s.keys() & job.ranks.keys():
            job.ranks[number].index = job.index
        told = [rank for rank in job.ranks.values() if rank.told.recent]
        for rank in told:
            self._judge_told(job, rank, seen.time)
        gone = [n for n, rank in job.ranks.items() if job.index - rank.index > FORGET_STEPS]
        for number in gone:
            del job.ranks[number]
        return bool(told or gone)

    def _verdicts(
        self, job: JobPauses, name: str, time: float, step: int, news: bool
    ) -> Iterable[Verdict]:
        """``news``: a pause that belongs to what is found."""
        now_on = tuple(number for number, rank in job.ranks.items() if rank.on)
        if any(job.ranks[number].told.on for number in now_on):
            now_on = tuple(n for n, r in job.ranks.items() if r.on or r.told.excess >= JOINT_EXCESS)
        was_on, job.on = job.on, now_on
        if not now_on:
            return (Fine(time, name),) if was_on else ()
        if not news and now_on == was_on:
            return ()
        return (self._found(job, name, time, step),)

    def _found(self, job: JobPauses, name: str, time: float, step: int) -> Found:
        worst = max(job.on, key=lambda number: self._cost(job, job.ranks[number]))
        rank, alone = job.ranks[worst], len(job.on) == 1
        cost = self._cost(job, rank)
        who = f"rank {worst}" if alone else f"each of {len(job.on)} ranks"
        if rank.told.on:
            begin, pause_s = rank.told.begin_step, rank.told.mean_s
            what = f"garbage collection stops {who} for {1000 * pause_s:.0f} ms at a time"
        else:
            begin, pause_s = rank.regular.begin_step, rank.regular.pause_s
            what = (
                f"{who} pauses {1000 * pause_s:.0f} ms every {rank.regular.period} steps, as "
                f"garbage collection does"
            )
        return Found(
            time=time,
            severity="warning",
            job=name,
            rank=worst if alone else None,
            step=step,
            begin_step=begin,
            value=cost,
            baseline=0.0,
            summary=f"{what}, {100 * cost:.1f} % of the time, since step {begin}",
        )

    def _cost(self, job: JobPauses, rank: RankPauses) -> float:
        """Share of the time that goes into pauses."""
        if rank.told.on:
            return rank.told.share
        regular = rank.regular
        between_s = max(1, regular.period) * job.step_s
        return regular.pause_s / between_s if between_s > 0 else 0.0

    def statuses(self) -> Iterable[DetectorStatus]:
        for name, job in self.state.jobs.items():
            if not job.ranks:
                yield DetectorStatus(
                    "learning", "one rank has no peers, no pause was reported", name
                )
            for number, rank in job.ranks.items():
                yield self._status(name, number, rank)

    def _status(self, name: str, number: int, rank: RankPauses) -> DetectorStatus:
        regular, config = rank.regular, self._config
        told = rank.told.share / config.min_share
        chain = regular.longest_chain / config.min_pauses
        return DetectorStatus(
            "found" if rank.on else "fine" if regular.known or rank.told.recent else "learning",
            f"rank {number}: pauses that were told take {100 * rank.told.share:.2f} % of the time; "
            f"the longest chain of slow steps at equal gaps has {regular.longest_chain} of "
            f"{config.min_pauses}",
            job=name,
            rank=number,
            value=rank.told.share,
            baseline=0.0,
            limit=config.min_share,
            nearest=max(rank.told.nearest, chain, told),
            nearest_step=regular.longest_chain_step,
        )
