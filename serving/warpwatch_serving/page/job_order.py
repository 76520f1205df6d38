"""Jobs in the order in which they need a person, each with one sentence.

In a synchronous job all ranks step together, so the step time alone tells them apart as little as
their waiting does: a slow rank works longer and waits less than the others.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from warpwatch_runtime.quantities import plural, seconds, text
from warpwatch_serving.page.headline import SEVERITIES, worst_first
from warpwatch_telemetry.anomalies import Anomaly
from warpwatch_telemetry.jobs import JobId
from warpwatch_telemetry.state import JobState, RankState, State

# A rank whose own time exceeds the median by less is like the others.
SLOW = 1.2
_TROUBLED = {"died": "has died", "stopped": "does not move"}


@dataclass(frozen=True, slots=True)
class RankedJob:
    """A job with its ranks in order, and its active anomalies, the worst first.

    tone: a severity, "well", or "over" if no rank runs. is_slow: whether ``sentence`` is about a
    rank in trouble.
    """

    job: JobState
    ranks: Sequence[RankState]
    anomalies: Sequence[Anomaly]
    sentence: str
    is_slow: bool

    @property
    def tone(self) -> str:
        if self.anomalies:
            return self.anomalies[0].severity
        if any(rank.status in _TROUBLED for rank in self.ranks):
            return "warning"
        if self.is_slow:
            return "info"
        return "well" if any(rank.status == "running" for rank in self.ranks) else "over"

    @property
    def named(self) -> set[int]:
        """The ranks that an active anomaly names."""
        return {one.rank for one in self.anomalies if one.rank is not None}


def ranked(state: State) -> list[RankedJob]:
    """Return all jobs: by the worst anomaly, with a rank in trouble before others, by size."""
    ranks: dict[JobId, list[RankState]] = {}
    for rank in state.ranks:
        ranks.setdefault(rank.job_id, []).append(rank)
    anomalies: dict[JobId | None, list[Anomaly]] = {}
    for one in worst_first(state):
        anomalies.setdefault(one.job_id, []).append(one)
    found = [
        _ranked(job, ranks.get(job.job_id, []), anomalies.get(job.job_id, [])) for job in state.jobs
    ]
    tones = (*SEVERITIES, "well", "over")

    def place(one: RankedJob) -> tuple[bool, int, bool, int, str]:
        tone = tones.index(one.tone)
        return not one.anomalies, tone, not one.is_slow, -len(one.ranks), one.job.name

    return sorted(found, key=place)


def _ranked(job: JobState, ranks: list[RankState], anomalies: list[Anomaly]) -> RankedJob:
    ranks.sort(key=lambda rank: rank.rank)
    sentence, is_slow = _sentence(ranks, own_times(ranks))
    return RankedJob(job, ranks, anomalies, sentence, is_slow)


def step_s(rank: RankState) -> float | None:
    return 1 / rank.steps_per_s if rank.steps_per_s else None


def own_times(ranks: Sequence[RankState]) -> dict[int, float]:
    """Return by rank the seconds of a step without waiting, or of all of it if that is unknown."""
    return {
        one.rank: max(0.0, took - (one.comm_s or 0.0))
        for one in ranks
        if (took := step_s(one)) is not None
    }


def _sentence(ranks: Sequence[RankState], own_s: Mapping[int, float]) -> tuple[str, bool]:
    """Return the slowest rank by name, and whether it is slow."""
    hosts = {one.rank: text(one.host, 40) for one in ranks}
    gone = [one for one in ranks if one.status in _TROUBLED]
    if gone:
        more = f", and {plural(len(gone) - 1, 'more rank')}" if len(gone) > 1 else ""
        status = _TROUBLED[gone[0].status]
        return f"Rank {gone[0].rank} on {hosts[gone[0].rank]} {status}{more}", True
    median_s = statistics.median(own_s.values()) if own_s else 0.0
    if not median_s:
        return "", False
    if len(ranks) == 1:
        return f"{seconds(median_s)} per step", False
    slowest = max(own_s, key=lambda rank: own_s[rank])
    ratio = own_s[slowest] / median_s
    if ratio < SLOW:
        return f"All alike: {seconds(median_s)} of a rank's own at the median", False
    waits = [one.comm_s for one in ranks if one.comm_s is not None and one.rank != slowest]
    waiting = f"; the others wait {seconds(statistics.median(waits))}" if waits else ""
    return (
        f"Rank {slowest} on {hosts[slowest]} is the slowest: {seconds(own_s[slowest])} itself, "
        f"{ratio:.1f} times the median of {seconds(median_s)}{waiting}"
    ), True
