"""Divides the budget of false alarms among the kinds that evaluate noisy values.

Healthy jobs vary too, so every limit is exceeded by chance now and then. The operator configures
how often a job may have a false alarm. This and the number of checks per day determine how far a
limit is above the noise.
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
# Servers have this kind instead of the kinds about steps that servers do not have.
SHARES_OF_SERVERS = {"latency_regression": 0.3}
# A check that fails more often by chance is useless, however large the budget is.
MOST_PER_CHECK = 0.01


def rate_per_s(kind: str, per_job_day: float = FALSE_ALARMS_PER_JOB_DAY) -> float:
    """Return the false alarms of this kind that a job may have per second."""
    return per_job_day * (SHARES | SHARES_OF_SERVERS)[kind] / DAY_S


@lru_cache(maxsize=4096)
def deviations(rate_per_s: float, check_s: float, ways: int = 1) -> float:
    """Return the standard deviations that normal noise exceeds at this rate.

    check_s: seconds from one independent check to the next. ways: the number of ranks or windows
    that share the rate (Bonferroni).
    """
    chance = min(max(rate_per_s * check_s / ways, 1e-15), MOST_PER_CHECK)
    return -NormalDist().inv_cdf(chance)
