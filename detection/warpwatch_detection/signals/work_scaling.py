"""How a rank's compute follows its work: the exponent that explains uneven sequence lengths.

compute ~ work^exponent; 1 where time is proportional to tokens, less with a fixed cost a step,
more where attention dominates. Fitted by least squares to what changes between steps, which a
rank that is always slower, or always has more work, does not move.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

# Time counts as proportional to work until this much squared change of log work has been seen.
PRIOR_WEIGHT = 0.05
# From this much on, older steps count less.
MAX_WEIGHT = 20.0
MAX_EXPONENT = 2.0
# One pause must not teach anything: changes of log compute beyond what work may explain are cut
# here (±65 %).
MAX_CHANGE = 0.5


@dataclass(slots=True)
class WorkScaling:
    products: float = PRIOR_WEIGHT
    squares: float = PRIOR_WEIGHT
    before: dict[int, tuple[float, float]] = field(default_factory=dict)

    @property
    def exponent(self) -> float:
        return min(max(self.products / self.squares, 0.0), MAX_EXPONENT)

    def explained(
        self, log_times: Mapping[int, float], work: Mapping[int, int]
    ) -> dict[int, float]:
        """The part of each rank's log time that its work explains.

        Nothing where work is not known of every rank, or is the same for all.
        """
        amounts = work.values()
        if len(work) < len(log_times) or len(set(amounts)) < 2 or min(amounts) <= 0:
            return {}
        log_work = {rank: math.log(work[rank]) for rank in log_times}
        exponent = self.exponent
        self._learn(log_times, log_work)
        return {rank: exponent * value for rank, value in log_work.items()}

    def _learn(self, log_times: Mapping[int, float], log_work: Mapping[int, float]) -> None:
        count = len(log_times)
        mean_time = sum(log_times.values()) / count
        mean_work = sum(log_work.values()) / count
        now: dict[int, tuple[float, float]] = {}
        for rank, log_time in log_times.items():
            now[rank] = (log_work[rank] - mean_work, log_time - mean_time)
            if (before := self.before.get(rank)) is not None:
                change = now[rank][0] - before[0]
                most = MAX_CHANGE + MAX_EXPONENT * abs(change)
                slower = min(max(now[rank][1] - before[1], -most), most)
                self.products += change * slower
                self.squares += change * change
        self.before = now
        if self.squares > MAX_WEIGHT:
            self.products /= 2
            self.squares /= 2
