"""The share of the time that reported pauses of one process take, forgotten exponentially.

Share and count decay with one time constant, so that three numbers are enough.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

# What decays within a minute, or within so many steps if they take longer, counts.
WINDOW_S = 60.0
WINDOW_STEPS = 150
# So many pauses must not have decayed yet: a lone full collection is no habit.
MIN_COUNT = 3
# Of the time: what a diagnosis calls costly.
MIN_SHARE = 0.01
# Decayed to less than this, the pauses are past.
LEAST_COUNT = 0.3


@dataclass(slots=True)
class ReportedPauses:
    """``lost_s``, ``count``: decayed to ``time``. ``share``: of the time, as judged last.

    excess: the share over its limit, less while there are few pauses; 1 at the limit.
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
        """A pause of the step that was running then (-1: unknown)."""
        self._decay(time, window_s)
        if not self.on and self.count < 1:
            self.begin_step = max(step, 0)
        self.lost_s += duration_s
        self.count += 1

    def judge(self, now: float, elapsed_s: float, window_s: float) -> None:
        """``elapsed_s``: since pauses count at all; what came before is no time without them."""
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
