"""Turns a job's steps, or a server's iterations, into samples that are corrected for their work.

The time of a training's step is about linear in its work. The time of an iteration follows from its
class, the prompt tokens, the requests that decode and the tokens in their KV cache. CUDA graphs
make it a staircase, attention a curve. So the usual time is learned in bins of similar work. An
iteration of an unknown bin, such as one giant prompt, is not evaluated.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from statistics import median

from warpwatch_detection.detector import WARMUP_STEPS, JobIteration, JobStep
from warpwatch_detection.signals.baselines import SIGMA_PER_MAD
from warpwatch_telemetry.records import Step

# Older steps count less: about the last 500 decide.
MEMORY = 0.998
# Work explains nothing before its relative squared changes reach this sum.
MIN_SQUARES = 0.01
# A change of time beyond this part of the step is a pause, and is not learned.
MAX_CHANGE = 0.7
# Weight of a new step in the level that the slope is relative to.
LEVEL_WEIGHT = 0.02
# Attention alone grows with the square of the length.
MAX_SLOPE = 2.0
MIN_FACTOR = 0.05


@dataclass(slots=True)
class StepWork:
    """A model of the step time: level * (1 + slope * (work / typical - 1)).

    The slope is a least-squares fit to the differences of successive steps, which neither a level
    shift nor a drift changes. typical: the work of the first step.
    """

    typical: float = 0.0
    level_s: float = 0.0
    products: float = 0.0
    squares: float = 0.0
    last_work: float = 0.0
    last_s: float = 0.0

    def explained(self, seen: JobStep, time_s: float) -> float:
        """Return the part of log(``time_s``) that work explains; 0 if work is even or unknown."""
        work = seen.work
        if not work:
            return 0.0
        if not self.typical:
            self.typical, self.level_s = work, time_s
            self.last_work, self.last_s = 1.0, time_s
        work /= self.typical
        slope = 0.0
        if self.squares >= MIN_SQUARES:
            slope = min(max(self.products / self.squares / self.level_s, 0.0), MAX_SLOPE)
        factor = max(1.0 + slope * (work - 1.0), MIN_FACTOR)
        change, slower_s = work - self.last_work, time_s - self.last_s
        self.last_work, self.last_s = work, time_s
        if abs(slower_s) < MAX_CHANGE * self.level_s:
            self.squares = MEMORY * self.squares + change * change
            self.products = MEMORY * self.products + change * slower_s
        cut_s = min(max(time_s / factor, 0.5 * self.level_s), 2.0 * self.level_s)
        self.level_s += LEVEL_WEIGHT * (cut_s - self.level_s)
        return math.log(factor)


# Warm-up ends when two neighbouring groups of this many steps agree ...
SETTLE_STEPS = 10
SETTLED = 0.05
SETTLED_ERRORS = 3.0 * 1.25 * math.sqrt(2.0 / SETTLE_STEPS)
# If the start is not stable after this many more steps, it is used as it is.
MAX_SETTLE_STEPS = 200
# Shorter steps are evaluated in groups of about this time: the operating system's scheduling costs
# milliseconds, which hardly matter in a tenth of a second.
SAMPLE_S = 0.1
MAX_GROUP = 1000


@dataclass(slots=True)
class StepSignal:
    """The samples of one job.

    group: the steps in a sample, 0 while the job warms up. sample_s: the length of a sample.
    first_step: the first step of the newest sample.
    """

    work: StepWork = field(default_factory=StepWork)
    start: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    group: int = 0
    sample_s: float = 0.0
    first_step: int = 0

    def add(self, seen: JobStep, time_s: float) -> float | None:
        """Return the log of a sample's time in seconds if the step completes a sample."""
        if seen.index < WARMUP_STEPS or time_s <= 0:
            return None
        value = math.log(time_s) - self.work.explained(seen, time_s)
        if not self.group:
            self._settle(value, given_up=seen.index >= WARMUP_STEPS + MAX_SETTLE_STEPS)
            return None
        if not self.values:
            self.first_step = seen.step
        self.values.append(value)
        if len(self.values) < self.group:
            return None
        sample = median(self.values)
        self.values.clear()
        return sample

    def window_of(self, seconds: float) -> int:
        """Return the number of samples that last at least ``seconds``."""
        return math.ceil(seconds / self.sample_s) if self.sample_s > 0 else 1

    def _settle(self, value: float, given_up: bool) -> None:
        start = self.start
        start.append(value)
        if len(start) < 2 * SETTLE_STEPS:
            return
        older, newer = start[:SETTLE_STEPS], start[SETTLE_STEPS:]
        center = median(newer)
        noise = SIGMA_PER_MAD * median([abs(each - center) for each in newer])
        change = abs(center - median(older))
        if change <= max(SETTLED, SETTLED_ERRORS * noise) or given_up:
            step_s = max(math.exp(center), 1e-6)
            self.group = max(1, min(int(SAMPLE_S / step_s), MAX_GROUP))
            self.sample_s = self.group * step_s
            start.clear()
        else:
            del start[:SETTLE_STEPS]


# --- servers ---

# The number of values that a bin is learned from.
LEARNED = 15
# A bin follows its newest values slowly: hours of another clock or temperature are not a fault. It
# is the mean of its first values, since a load that moves to other bins shows the error of each.
FOLLOW = 1 / 2000
MEAN_VALUES = 250
# A bin does not follow a value that is higher by more than this, as a logarithm.
MAX_FOLLOWED = 0.3
# Real loads fill a few hundred bins; the least recently used one is removed.
MAX_BINS = 2048
# Counts up to it have a bin each, as CUDA graphs do.
EXACT = 8
# Widths of the bins of larger counts. Prompts dominate their iterations, so the requests that
# decode next to them matter less.
DECODE_WIDTH, KV_WIDTH, PREFILL_WIDTH, BESIDE_WIDTH = 1.12, 1.1, 1.15, 1.5
# The least time and number of iterations that make a sample: one may wait for a core.
LEAST_SAMPLE_S, LEAST_ITERATIONS = 1.0, 5


@dataclass(slots=True)
class WorkBin:
    """The usual value of one kind of work. values: its first values; count: of all so far."""

    usual: float = 0.0
    count: int = 0
    values: list[float] = field(default_factory=list)


def size(count: int, width: float) -> int:
    """Return the bin of a count: exact up to EXACT, then ``width`` times wider each."""
    return count if count <= EXACT else EXACT + round(math.log(count / EXACT) / math.log(width))


@dataclass(slots=True)
class IterationSignal:
    """The samples of a server: medians over about a second of the log of the time over the usual.

    bins: the usual logarithms of equal work, in the order of their last use. usual_s: the usual
    time of the newest sample's work. group, sample_s, first_step: the iterations of the newest
    sample, their time, and the number of the first.
    """

    bins: dict[tuple[int, ...], WorkBin] = field(default_factory=dict)
    residuals: list[float] = field(default_factory=list)
    seconds: float = 0.0
    count: int = 0
    usual_s: float = 0.0
    group: int = 0
    sample_s: float = 0.0
    first_step: int = 0

    def add(self, seen: JobIteration, learns: bool) -> float | None:
        """Return the sample that the iteration completes. learns: whether no rise lasts."""
        if seen.index < WARMUP_STEPS or seen.duration_s <= 0:
            return None
        residual = self._residual(work_bin(seen), math.log(seen.duration_s), learns)
        if residual is None:
            return None
        if not self.residuals:
            self.first_step, self.seconds, self.count = seen.step, 0.0, 0
        self.residuals.append(residual)
        self.seconds += seen.duration_s * seen.count
        self.count += seen.count
        if self.seconds < LEAST_SAMPLE_S or self.count < LEAST_ITERATIONS:
            return None
        sample = median(self.residuals)
        self.group, self.sample_s = self.count, self.seconds
        self.usual_s = self.seconds / self.count * math.exp(-sample)
        self.residuals.clear()
        return sample

    def accept(self, level: float) -> None:
        """Let ``level`` be the usual one of all bins, whenever they were learned."""
        for known in self.bins.values():
            known.usual += level
            known.values = [value + level for value in known.values]

    def _residual(self, key: tuple[int, ...], value: float, learns: bool) -> float | None:
        """Return the value minus the bin's usual one, or None while the bin is not known."""
        known = self.bins.pop(key, None) or WorkBin()
        if known.count or learns:
            self.bins[key] = known
        if len(self.bins) > MAX_BINS:
            del self.bins[next(iter(self.bins))]
        known.count += learns
        if len(known.values) < LEARNED:
            if learns:
                known.values.append(value)
                known.usual = median(known.values)
            return None
        residual = value - known.usual
        if learns and residual < MAX_FOLLOWED:
            weight = 1 / known.count if known.count <= MEAN_VALUES else FOLLOW
            known.usual += weight * max(-MAX_FOLLOWED, residual)
        return residual


def work_bin(seen: JobIteration | Step) -> tuple[int, int, int]:
    """Return the kind of work of an iteration; equal kinds take about the same time."""
    if not seen.prefill_tokens:
        return 0, size(seen.decode_requests, DECODE_WIDTH), size(seen.kv_tokens, KV_WIDTH)
    beside = size(seen.decode_requests, BESIDE_WIDTH), size(seen.kv_tokens, BESIDE_WIDTH)
    return 1 + size(seen.prefill_tokens, PREFILL_WIDTH), *beside
