"""The share of the time that told pauses of one process take, forgotten exponentially.

Share and count decay with one time constant, so nothing but three numbers is remembered.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from warpwatch_detection.config_ranks import GcPauseConfig

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

    def judge(self, now: float, elapsed_s: float, window_s: float, config: GcPauseConfig) -> None:
        """``elapsed_s``: since pauses count at all; what came before is no time without them."""
        self._decay(now, window_s)
        # Time decays like the pauses: so much of it lies in memory.
        window_s *= -math.expm1(-max(elapsed_s, 1e-3) / window_s)
        self.share = min(self.lost_s / max(window_s, config.window_s / 4), 1.0)
        enough = self.count >= config.min_pauses - 1
        self.excess = self.share / config.min_share * min(1, self.count / (config.min_pauses - 1))
        self.nearest = max(self.nearest, self.excess)
        if enough and self.share >= config.min_share:
            self.on = True
        elif self.share < config.min_share / 2 or self.count < LEAST_COUNT:
            self.on = False

    def _decay(self, now: float, window_s: float) -> None:
        passed_s = max(0.0, now - self.time)
        self.time = max(now, self.time)
        kept = math.exp(-passed_s / window_s)
        self.lost_s *= kept
        self.count *= kept
        if self.count < LEAST_COUNT:
            self.lost_s = self.count = 0.0
