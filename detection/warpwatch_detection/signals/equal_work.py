"""Compares each iteration of a server with earlier ones that had to do the same.

The time of an iteration follows from its work: the class, the prompt tokens, the requests that
decode, and the tokens in their KV cache. CUDA graphs make it a staircase, attention a curve. So the
usual time is learned in bins of similar work instead of by a formula. An iteration of a bin
that is not known yet, such as one giant prompt, is not evaluated.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from statistics import median

from warpwatch_detection.detector import WARMUP_STEPS, JobIteration

# Values that a bin is learned from.
LEARNED = 15
# A bin follows its newest values slowly: hours of another clock or temperature are not a fault.
FOLLOW = 1 / 2000
# A value further away than this, as a logarithm, teaches a bin nothing.
MAX_FOLLOWED = 0.3
# Real loads fill some hundred bins; the one that was not used for longest goes.
MAX_BINS = 2048
# Counts up to it have a bin each, as CUDA graphs do.
EXACT = 8
# Widths of the bins of larger counts. Prompts dominate their iterations: what decodes beside them
# matters less.
DECODE_WIDTH, KV_WIDTH, PREFILL_WIDTH, BESIDE_WIDTH = 1.12, 1.1, 1.15, 1.5
# The least time and number of iterations that make a sample: one may wait for a core.
SAMPLE_S, SAMPLE_ITERATIONS = 1.0, 5


@dataclass(slots=True)
class WorkBin:
    """The usual value of one kind of work. values: those that it is learned from."""

    usual: float = 0.0
    values: list[float] = field(default_factory=list)


@dataclass(slots=True)
class EqualWork:
    """The logarithm of a time over the usual one of the same work.

    level: the sum of the shifts that were found: all bins share it, whenever they were learned.
    """

    bins: dict[tuple[int, ...], WorkBin] = field(default_factory=dict)
    level: float = 0.0

    def residual(self, key: tuple[int, ...], value: float, learns: bool) -> float | None:
        """Return the value over the bin's, or None while the bin is learned."""
        known = self.bins.pop(key, None) or WorkBin()
        self.bins[key] = known
        if len(self.bins) > MAX_BINS:
            del self.bins[next(iter(self.bins))]
        if len(known.values) < LEARNED:
            known.values.append(value - self.level)
            known.usual = median(known.values)
            return None
        residual = value - known.usual
        if learns and abs(residual - self.level) < MAX_FOLLOWED:
            known.usual += FOLLOW * (residual - self.level)
        return residual


def size(count: int, width: float) -> int:
    """Return the bin of a count: exact up to EXACT, then ``width`` times wider each."""
    return count if count <= EXACT else EXACT + round(math.log(count / EXACT) / math.log(width))


@dataclass(slots=True)
class IterationSignal:
    """Samples of iterations at equal work: medians of residuals over about a second.

    usual_s: the time that the newest sample's work takes usually. group, sample_s, first_step: the
    iterations of a sample, their time, the number of the first.
    """

    work: EqualWork = field(default_factory=EqualWork)
    residuals: list[float] = field(default_factory=list)
    seconds: float = 0.0
    count: int = 0
    usual_s: float = 0.0
    group: int = 0
    sample_s: float = 0.0
    first_step: int = 0

    def add(self, seen: JobIteration, learns: bool) -> float | None:
        """Return the sample that the iteration completes. learns: no rise lasts."""
        if seen.index < WARMUP_STEPS or seen.duration_s <= 0:
            return None
        value = math.log(seen.duration_s)
        residual = self.work.residual(_bin(seen), value, learns)
        if residual is None:
            return None
        if not self.residuals:
            self.first_step, self.seconds, self.count = seen.step, 0.0, 0
        self.residuals.append(residual)
        self.seconds += seen.duration_s * seen.count
        self.count += seen.count
        if self.seconds < SAMPLE_S or self.count < SAMPLE_ITERATIONS:
            return None
        self.group, self.sample_s = self.count, self.seconds
        self.usual_s = self.seconds / self.group * math.exp(-median(self.residuals))
        sample = median(self.residuals)
        self.residuals.clear()
        return sample


def _bin(seen: JobIteration) -> tuple[int, int, int]:
    if not seen.prefill_tokens:
        return 0, size(seen.decode_requests, DECODE_WIDTH), size(seen.kv_tokens, KV_WIDTH)
    beside = size(seen.decode_requests, BESIDE_WIDTH), size(seen.kv_tokens, BESIDE_WIDTH)
    return 1 + size(seen.prefill_tokens, PREFILL_WIDTH), *beside
