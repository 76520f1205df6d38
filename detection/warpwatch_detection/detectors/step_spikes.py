"""Detects slow steps among normal ones: intermittent faults that do not change the level.

The slow steps are an anomaly if they are far more likely at the rate that is worth an alarm than at
the job's own rate. This is a CUSUM of Bernoulli trials (Reynolds and Stoumbos, 1999).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from warpwatch_detection.detector import (
    WARMUP_STEPS,
    DetectorStatus,
    JobStep,
    Nearest,
    Results,
    StepsDetector,
    job_status,
)
from warpwatch_detection.signals.samples import StepWork
from warpwatch_telemetry.anomalies import Detected

# A slow step is 15 % and 20 ms longer than normal, which scheduling by the operating system does
# not cause. It is also 3.5 deviations longer, which normal noise exceeds in 1 of 4,000 steps.
MIN_SPIKE = 0.15
MIN_SPIKE_S = 0.02
NOISE_FACTOR = 3.5
# A detector that misses steps 50 % longer than normal is blind.
EFFECT = 0.5
# The share of slow steps that is worth an alarm.
ALARM_SHARE = 0.1
# The newest 40 steps define a normal step; this is updated every few steps.
WINDOW = 40
UPDATE_NORMAL_STEPS = 4
# One standard deviation below the median of a normal distribution; slow steps do not move it.
LOW_QUANTILE = 0.16
# The weight of a new value in the deviation: about 100 steps.
DEVIATION_WEIGHT = 0.04
# The rate in health is learned from about the last 1,000 steps, and is at least one in 100.
RATE_WEIGHT = 0.001
MIN_RATE = 0.01
# An alarm's rate is at least MIN_RATIO times the job's own rate, and at most MAX_RATE.
MIN_RATIO = 4.0
MAX_RATE = 0.9
# This many equal gaps in a row are a period (checkpoint, evaluation, logging), and not counted.
PERIODIC_GAPS = 3
PERIOD_TOLERANCE = 0.01
SHORTEST_PERIOD = 5
# Above this share of slow steps the level rose, so they are not spikes. After MIN_STEPS the median
# has followed the level.
MAX_SHARE = 0.4
MIN_STEPS = WINDOW // 2
# The limit for the newest dozen steps alone.
BURST_WEIGHT = 1 / 12
MAX_BURST = 0.5
# The present rate is that of about the last 60 steps. The anomaly is over below a quarter of the
# rate that is worth an alarm.
RECENT_WEIGHT = 1 / 60
CLOSING_SHARE = 0.25
UPDATE_STEPS = 40


@dataclass(slots=True)
class SpikesJob(Nearest):
    """One job; values are logs of seconds.

    values: the newest steps. level, deviation, limit: of normal steps; a step above it is slow.
    evidence: the CUSUM. rate: the healthy share of slow steps. recent, burst: their present shares.
    excess: the mean log of a slow step over the level. count: the evaluated steps. last, spikes:
    this count at the newest slow step, and at the newest spikes. since, slow, began: the count at
    the start of the present evidence, its slow steps, and its first step.
    """

    index: int = -1
    work: StepWork = field(default_factory=StepWork)
    values: list[float] = field(default_factory=list)
    count: int = 0
    level: float = 0.0
    deviation: float = -1.0
    limit: float = math.inf
    evidence: float = 0.0
    rate: float = MIN_RATE
    recent: float = 0.0
    burst: float = 0.0
    excess: float = 0.0
    last: int = -2
    spikes: list[int] = field(default_factory=list)
    since: int = 0
    slow: int = 0
    began: int = 0
    on: bool = False


class StepSpikes(StepsDetector[SpikesJob]):
    kind = "step_spikes"
    state_of = SpikesJob

    def evaluate(self, job: SpikesJob, seen: JobStep) -> Results:
        if seen.index < WARMUP_STEPS or seen.common_s <= 0:
            return ()
        value = math.log(seen.common_s) - job.work.explained(seen, seen.common_s)
        if not self._learn(job, value):
            return ()
        job.count += 1
        self._count(job, value, seen)
        return self._decide(job, seen)

    def statuses(self) -> Iterable[DetectorStatus]:
        for name, job in self.state.jobs.items():
            if job.deviation < 0 or not math.isfinite(job.limit):
                text = "what a normal step takes is not known yet"
                yield job_status(name, False, text, learns=True)
                continue
            needed = self._needed(job)
            text = (
                f"{100 * job.recent:.1f} % of the last steps take {math.exp(job.limit):.3g} s or "
                f"more, usually {100 * job.rate:.1f} %: evidence {job.evidence:.1f}, limit "
                f"{needed:.1f}"
            )
            eyes = {"sees": math.expm1(min(job.limit - job.level, 10.0)), "effect": EFFECT}
            yield job_status(name, job.on, text, job.evidence, needed, job, baseline=0.0, **eyes)

    def _learn(self, job: SpikesJob, value: float) -> bool:
        """Update level and limit from the steps before this one. Return False for too few."""
        values = job.values
        full = len(values) >= WINDOW
        if full and (job.count % UPDATE_NORMAL_STEPS == 0 or job.deviation < 0):
            ordered = sorted(values)
            job.level = ordered[WINDOW // 2 - 1]
            deviation = job.level - ordered[int(WINDOW * LOW_QUANTILE)]
            weight = DEVIATION_WEIGHT if job.deviation >= 0 else 1.0
            job.deviation += weight * (deviation - job.deviation)
            least = max(MIN_SPIKE, MIN_SPIKE_S / math.exp(job.level))
            job.limit = job.level + max(math.log1p(least), NOISE_FACTOR * job.deviation)
        if full:
            del values[0]
        values.append(value)
        return full

    def _count(self, job: SpikesJob, value: float, seen: JobStep) -> None:
        is_slow = value > job.limit
        job.recent += RECENT_WEIGHT * (is_slow - job.recent)
        job.burst += BURST_WEIGHT * (is_slow - job.burst)
        if is_slow and not self._is_spike(job, value):
            return
        # Without evidence a normal step changes nothing.
        if is_slow or job.evidence > 0 or job.rate >= MAX_RATE:
            self._weigh(job, is_slow, seen)
        if not job.on and job.evidence < self._needed(job) / 2:
            job.rate += RATE_WEIGHT * (is_slow - job.rate)

    def _is_spike(self, job: SpikesJob, value: float) -> bool:
        """Return whether a slow step counts. A run counts once, periodic steps do not count."""
        job.slow += 1
        job.excess += 0.1 * (value - job.level - job.excess)
        follows = job.count - job.last == 1
        job.last = job.count
        return not (follows or self._periodic(job))

    def _weigh(self, job: SpikesJob, is_slow: bool, seen: JobStep) -> None:
        usual = max(MIN_RATE, job.rate)
        alarming = min(max(ALARM_SHARE, MIN_RATIO * usual), MAX_RATE)
        if is_slow:
            if job.evidence <= 0:
                job.since, job.slow, job.began = job.count, 1, seen.step
            job.evidence += math.log(alarming / usual)
        else:
            job.evidence += math.log((1 - alarming) / (1 - usual))
        job.evidence = min(max(job.evidence, 0.0), 2 * self._needed(job))

    def _needed(self, job: SpikesJob) -> float:
        """Return the evidence that chance reaches as often as the budget allows.

        It is the log of a likelihood ratio. The evidence begins at a spike, which comes at the
        usual rate. It reaches h from there with the probability e^-h times the ratio of the first
        spike (Wald). This is divided by the ratio of the overshoot, which is half a spike on
        average (Siegmund, Sequential Analysis, 1985).
        """
        step_s, usual = math.exp(job.level), max(MIN_RATE, job.rate)
        alarming = max(ALARM_SHARE, MIN_RATIO * usual)
        chance = alarming / (self._rate_per_s * step_s)
        return math.log(chance) - math.log(alarming / usual) / 2

    def _periodic(self, job: SpikesJob) -> bool:
        job.spikes = [*job.spikes[-PERIODIC_GAPS:], job.count]
        gaps = [later - earlier for earlier, later in zip(job.spikes, job.spikes[1:], strict=False)]
        if len(gaps) < PERIODIC_GAPS or gaps[-1] < SHORTEST_PERIOD:
            return False
        return max(gaps) - min(gaps) <= 2 * PERIOD_TOLERANCE * max(gaps)

    def _decide(self, job: SpikesJob, seen: JobStep) -> Results:
        needed = self._needed(job)
        job.reach(job.evidence / needed, seen.step)
        if job.on:
            if job.recent < CLOSING_SHARE * ALARM_SHARE:
                job.on, job.evidence = False, 0.0
                return (seen.cleared(),)
            return (self._found(job, seen),) if job.count % UPDATE_STEPS == 0 else ()
        steps = job.count - job.since + 1
        if job.evidence < needed or steps < MIN_STEPS:
            return ()
        share = job.slow / steps
        if share > MAX_SHARE or job.burst > MAX_BURST:
            job.evidence = 0.0
            return ()
        job.on, job.recent = True, share
        return (self._found(job, seen),)

    def _found(self, job: SpikesJob, seen: JobStep) -> Detected:
        slower = 100 * math.expm1(job.excess)
        text = (
            f"{100 * job.recent:.0f} % of the steps since step {job.began} take about "
            f"{slower:.0f} % longer than the others, {100 * job.rate:.1f} % did before"
        )
        return seen.found(text, job.recent, job.rate, begin_step=job.began)
