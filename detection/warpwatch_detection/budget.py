"""The budget of false alarms: how the kinds that judge noise share it, and what a look may cost.

Healthy jobs vary as well, so every limit is passed by chance now and then. The
operator says how often a job may raise a false alarm; how far a limit lies above the noise follows
from it and from how many looks the job gives in a day.
"""

from __future__ import annotations

from functools import lru_cache
from statistics import NormalDist

DAY_S = 86400.0
FALSE_ALARMS_PER_JOB_DAY = 0.5
# Sums to 1. The kinds that find the most faults get the most.
SHARES = {
    "step_regression": 0.35,
    "step_drift": 0.1,
    "step_spikes": 0.15,
    "comm_slow": 0.1,
    "data_stall": 0.1,
    "straggler": 0.1,
    "gc_pause": 0.1,
}
# Servers have this kind instead of those about steps that they do not have.
SHARES_OF_SERVERS = {"latency_regression": 0.3}
# A check that is positive once in a hundred times tests nothing, however large the budget.
MOST_PER_LOOK = 0.01


def rate_per_s(kind: str, per_job_day: float = FALSE_ALARMS_PER_JOB_DAY) -> float:
    """False alarms of this kind that a job may raise a second."""
    return per_job_day * (SHARES | SHARES_OF_SERVERS)[kind] / DAY_S


@lru_cache(maxsize=4096)
def deviations(rate_per_s: float, look_s: float, ways: int = 1) -> float:
    """Standard deviations that normal noise passes at this rate.

    look_s: seconds from one independent look to the next. ways: among how many ranks or windows
    the rate is divided (Bonferroni).
    """
    chance = min(max(rate_per_s * look_s / ways, 1e-15), MOST_PER_LOOK)
    return -NormalDist().inv_cdf(chance)
