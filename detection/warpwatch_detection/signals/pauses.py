"""Tracks the pauses of one rank: reported by the shim, or seen in its steps at equal gaps.

A garbage collector runs after a number of new objects, so it stops its process at a regular number
of steps. Single pauses have no period, and writes or evaluations on all ranks cancel.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

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
    time. excess: the share over its limit, less while there are few pauses; 1 at the limit.
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

    @property
    def mean_s(self) -> float:
        return self.lost_s / self.count if self.count > 0 else 0.0

    def add(self, time: float, duration_s: float, step: int, window_s: float) -> None:
        """Count a pause. step: the step that was running (-1: unknown)."""
        self._decay(time, window_s)
        if not self.on and self.count < 1:
            self.begin_step = max(step, 0)
        self.lost_s += duration_s
        self.count += 1

    def judge(self, now: float, elapsed_s: float, window_s: float) -> None:
        """Evaluate the share of pauses. ``elapsed_s``: the time since pauses were first counted."""
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
# The first steps set the usual ratio and its noise.
FIRST_STEPS = 3
# Weight of a new step in the usual ratio and its noise; early steps are learned faster.
WEIGHT = 0.02
FAST_STEPS = 50
# A larger difference is learned as this many times the noise.
WINSOR = 3.0
# A mean of cut absolute values, normally distributed, times this is their standard deviation.
SIGMA_PER_MEAN = 1.2533
# A slow step is 8 % and six deviations above the rank's usual ratio.
MIN_RISE = math.log(1.08)
NOISE_FACTOR = 6.0
# This many slow steps in a row are a new level of the rank, not a pause.
LEVEL_STEPS = 4
# Steps after which the usual ratio is known.
READY_STEPS = 50
# A full collection of about ten million objects takes this long.
MAX_PAUSE_S = 5.0
# The newest pauses are kept. A chain has at least MIN_PAUSES: fewer may be equally far apart by
# chance.
MAX_PAUSES = 24
MIN_PAUSES = 4
# A shorter period is a slow rank; a longer one is that of checkpoints and evaluations.
MIN_PERIOD_STEPS, MAX_PERIOD_STEPS = 5, 80
# Pauses of a chain that may be missing: one in a checkpoint is not seen.
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

    center, scale: the usual log ratio to its peers, and its noise. steps, pauses_s: the newest
    pauses, oldest first. period (0: none), begin_step, pause_s: of the found chain. run: slow steps
    in a row; pending_step, pending_s: the newest of these, which may be a pause.
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
        """Add a step. Return whether it ended a pause that continues a chain of regular ones.

        rate: how many chains per step random pauses may form.
        """
        self.known += 1
        rise = ratio - self.center
        scale = self.scale if self.scale > MIN_SCALE else MIN_SCALE
        if self.known <= FIRST_STEPS:
            self._begin(rise)
            return False
        weight = WEIGHT if self.known >= FAST_STEPS else 1 / self.known
        size = min(abs(rise), WINSOR * scale)
        self.center += weight * (size if rise > 0 else -size)
        self.scale += weight * (SIGMA_PER_MEAN * size - self.scale)
        if rise > MIN_RISE and rise > NOISE_FACTOR * scale and self.known > READY_STEPS:
            self._add_slow_step(step, ratio, rise, compute_s)
            return False
        if self.period and step - self.steps[-1] > SILENT_PERIODS * self.period:
            self.period = 0
        if not self.run:
            return False
        is_single, self.run = self.run == 1, 0
        return is_single and self.pending_s <= MAX_PAUSE_S and self._add_pause(rate)

    def _begin(self, rise: float) -> None:
        self.center += rise / self.known
        self.scale = max(self.scale, abs(rise) if self.known > 1 else 0.0, MIN_SCALE)

    def _add_slow_step(self, step: int, ratio: float, rise: float, compute_s: float) -> None:
        """Note a slow step: it is a pause, or LEVEL_STEPS of them are a new level."""
        self.run += 1
        self.pending_step, self.pending_s = step, -math.expm1(-rise) * compute_s
        if self.run >= LEVEL_STEPS:
            self.center, self.run = ratio, 0

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
        arbitrary and sets the period; each further pause must hit it, except for one.
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
        """Return whether pauses are at round steps, as of a script that logs or writes."""
        chain = [self.steps[place] for place in self._chain(self.period)]
        return self.period % ROUND_STEPS == 0 and (
            all(step % self.period == 0 for step in chain)
            or all((step + 1) % self.period == 0 for step in chain)
        )


def _tolerance(period: int) -> int:
    return max(1, int(GAP_TOLERANCE * period))
