"""A slow rise of the job's step time: too slow to be a level shift, until it has become much."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from warpwatch_detection.config_steps import ShiftConfig, StepDriftConfig
from warpwatch_detection.detector import DetectorStatus, Fine, JobDetector, JobStep, Verdict
from warpwatch_detection.signals.level_shift import LevelShift
from warpwatch_detection.signals.rise import Rise
from warpwatch_detection.signals.signal_history import level
from warpwatch_detection.signals.step_signal import StepSignal, add_common
from warpwatch_telemetry.anomalies import Found

# Samples of a block; all that follows is counted in blocks.
BLOCK = 20
# The level now, and the level that it is compared with: 260 to 600 samples ago.
NOW = 5
OLDER_FROM, OLDER_TO = 30, 13
MIN_OLDER = 8
# The level after warm-up is learned from so many blocks and then frozen; a rolling one would
# absorb a rise that takes longer than it remembers. It is compared with as long a level of now.
ANCHOR = 20
ANCHOR_NOW = 10
# A rise of which more came within NOW blocks than a ramp would bring is no drift.
SUDDEN_SHARE = 0.75
# A shift is another detector's: after one, the drift is sought anew. It may be told later here.
SHIFTS = ShiftConfig()
SHORTEST_WINDOW = 24


@dataclass(slots=True)
class DriftJob:
    """Logs of seconds. blocks: the newest levels; first_steps: where they begin.

    anchor: sum of the first ``anchored`` blocks. rise, limit: at the newest block.
    """

    index: int = -1
    signal: StepSignal = field(default_factory=StepSignal)
    shifts: LevelShift = field(default_factory=LevelShift)
    block: list[float] = field(default_factory=list)
    blocks: list[float] = field(default_factory=list)
    first_steps: list[int] = field(default_factory=list)
    anchor: float = 0.0
    anchored: int = 0
    anchor_step: int = 0
    open_rise: Rise | None = None
    rise: float = 0.0
    limit: float = math.inf
    nearest: float = 0.0
    nearest_step: int | None = None

    @property
    def on(self) -> bool:
        return self.open_rise is not None


@dataclass(slots=True)
class DriftState:
    jobs: dict[str, DriftJob] = field(default_factory=dict)


class StepDrift(JobDetector[DriftJob]):
    kind = "step_drift"

    def __init__(self, config: StepDriftConfig) -> None:
        self._config = config
        self.state = DriftState()

    def begin(self) -> DriftJob:
        return DriftJob()

    def judge(self, job: DriftJob, seen: JobStep) -> Iterable[Verdict]:
        value = add_common(job, seen, self._config)
        if value is None:
            return ()
        if not job.shifts.least_window:
            shortest = job.signal.window_of(SHIFTS.block_s)
            job.shifts.least_window = max(SHORTEST_WINDOW, shortest)
        if job.shifts.judge(SHIFTS) is not None:
            return self._restart(job, seen)
        if not job.block:
            job.first_steps.append(job.signal.first_step)
        job.block.append(value)
        return self._end_block(job, seen) if len(job.block) == BLOCK else ()

    def statuses(self) -> Iterable[DetectorStatus]:
        for name, job in self.state.jobs.items():
            if not math.isfinite(job.limit):
                text = f"{len(job.blocks)} blocks of {BLOCK} samples, too few for a slow rise"
                yield DetectorStatus("learning", text, job=name)
                continue
            yield DetectorStatus(
                answer="found" if job.open_rise else "fine",
                text=f"level {100 * job.rise:+.1f} % against long ago, "
                f"limit {100 * job.limit:.1f} %",
                job=name,
                value=job.rise,
                baseline=0.0,
                limit=job.limit,
                nearest=job.nearest,
                nearest_step=job.nearest_step,
            )

    def _restart(self, job: DriftJob, seen: JobStep) -> Iterable[Verdict]:
        over = job.open_rise is not None
        job.open_rise, job.anchor, job.anchored = None, 0.0, 0
        job.block.clear()
        job.blocks.clear()
        job.first_steps.clear()
        return (Fine(seen.time, seen.job),) if over else ()

    def _end_block(self, job: DriftJob, seen: JobStep) -> Iterable[Verdict]:
        block = level(job.block)
        job.block.clear()
        job.blocks = [*job.blocks[1 - OLDER_FROM :], block]
        job.first_steps = job.first_steps[-OLDER_FROM:]
        if job.anchored < ANCHOR:
            if not job.anchored:
                job.anchor_step = job.first_steps[-1]
            job.anchor += block
            job.anchored += 1
        if job.open_rise is not None:
            return self._go_on(job, job.open_rise, seen)
        begun = self._risen(job, seen)
        if begun is None:
            return ()
        job.open_rise = begun
        return (self._found(begun, mean(job.blocks[-NOW:]), seen),)

    def _risen(self, job: DriftJob, seen: JobStep) -> Rise | None:
        """The rise that is over its limit, against long ago or against the beginning."""
        noise = job.shifts.deviation(self._config.alarm_rate)
        older = job.blocks[-OLDER_FROM:-OLDER_TO]
        if len(older) < MIN_OLDER or not math.isfinite(noise):
            return None
        now, before = mean(job.blocks[-NOW:]), mean(older)
        job.rise, job.limit = now - before, max(self._config.min_effect, noise)
        begin = job.first_steps[-OLDER_TO]
        if job.anchored == ANCHOR:
            anchor, late = job.anchor / ANCHOR, mean(job.blocks[-ANCHOR_NOW:])
            limit = max(self._config.anchor_effect, noise)
            if (late - anchor) / limit > job.rise / job.limit:
                job.rise, job.limit, before = late - anchor, limit, anchor
                begin = job.anchor_step
        if job.rise / job.limit > job.nearest:
            job.nearest, job.nearest_step = job.rise / job.limit, seen.step
        if job.rise < job.limit or steepest(job.blocks) > SUDDEN_SHARE * job.rise:
            return None
        return Rise(seen.time, begin, before, job.rise)

    def _go_on(self, job: DriftJob, open_rise: Rise, seen: JobStep) -> Iterable[Verdict]:
        config = self._config
        open_rise.samples += BLOCK
        now = mean(job.blocks[-NOW:])
        accepted = open_rise.accepted(seen.time, config.accept_after_s, config.accept_samples)
        if accepted or open_rise.over(now):
            return self._restart(job, seen)
        return (self._found(open_rise, now, seen),)

    def _found(self, open_rise: Rise, now: float, seen: JobStep) -> Found:
        value_s, baseline_s = math.exp(now), math.exp(open_rise.baseline)
        begin = open_rise.begin_step
        return Found(
            time=seen.time,
            severity="warning",
            job=seen.job,
            step=seen.step,
            begin_step=begin,
            value=value_s,
            baseline=baseline_s,
            summary=f"steps have slowly become {100 * (value_s / baseline_s - 1):.0f} % longer "
            f"since about step {begin}: {value_s:.3g} s instead of {baseline_s:.3g} s",
        )


def steepest(blocks: list[float]) -> float:
    """The most that ``NOW`` blocks rose above as many before them, since the older level."""
    last = len(blocks)
    return max(
        mean(blocks[at : at + NOW]) - mean(blocks[at - NOW : at])
        for at in range(max(NOW, last - OLDER_TO), last - NOW + 1)
    )


def mean(values: list[float]) -> float:
    return sum(values) / len(values)
