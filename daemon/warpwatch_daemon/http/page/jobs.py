"""Jobs and their ranks."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from warpwatch_daemon.http.page.charts import phase_shares
from warpwatch_daemon.quantities import (
    joules,
    percent,
    plural,
    rate,
    seconds,
    text,
    tokens_per_joule,
)
from warpwatch_telemetry.state import JobState, RankState, State

MAX_JOBS = 20
MAX_RANKS = 32
# What is said of a rank without a heartbeat, by its silent_reason.
SILENCE = {
    "stopped": "stopped by a signal, a debugger or a frozen container",
    "holds the GIL": "a C call holds the GIL: no other thread runs",
}
# What the numbers beside a chart are taken of: the newest steps.
RECENT_STEPS = 20


class LegendEntry(NamedTuple):
    """``share``: of the ranks' time, on average."""

    name: str
    colour: int
    share: str


def listed(state: State) -> list[JobState]:
    """The first MAX_JOBS jobs: those that run come first."""
    running = {rank.job_id for rank in state.ranks if rank.status == "running"}
    return sorted(state.jobs, key=lambda job: job.job_id not in running)[:MAX_JOBS]


def ranks_of(job: JobState, state: State) -> list[RankState]:
    ranks = [rank for rank in state.ranks if rank.job_id == job.job_id]
    return sorted(ranks, key=lambda rank: rank.rank)


def where(rank: RankState, gpus: Mapping[str, str]) -> str:
    return " · ".join(part for part in (gpus.get(rank.device or ""), text(rank.host, 40)) if part)


def newest(rank: RankState) -> str:
    return seconds(rank.recent_s[-1] if rank.recent_s else None)


def median(rank: RankState) -> str:
    recent = rank.recent_s[-RECENT_STEPS:]
    return seconds(statistics.median(recent) if recent else None)


def rates(rank: RankState) -> list[str]:
    known = ((rank.samples_per_s, "samples"), (rank.tokens_per_s, "tokens"))
    return [rate(per_s, what) for per_s, what in known if per_s]


def legend(ranks: Sequence[RankState]) -> list[LegendEntry]:
    """The phases of these ranks."""
    widths: dict[tuple[int, str], float] = {}
    drawn = 0
    for rank in ranks:
        shares = phase_shares(rank.phases_s, rank.durations.sum)
        drawn += bool(shares)
        for share in shares:
            key = (share.colour, share.name)
            widths[key] = widths.get(key, 0.0) + share.width
    return [
        LegendEntry(name, colour, percent(width / drawn / 100))
        for (colour, name), width in sorted(widths.items())
    ]


def facts(job: JobState, ranks: Sequence[RankState]) -> list[str]:
    """Whose it is, how many ranks, and what they do together."""
    running = [rank for rank in ranks if rank.steps_per_s]
    of = f" of {job.world_size}" if job.world_size > len(ranks) else ""
    known = [text(job.owner, 60), f"{plural(len(ranks), 'rank')}{of}"]
    if running:
        # Ranks step together, so a job is as fast as one of them, and its input adds up.
        steps_per_s = statistics.median(rank.steps_per_s or 0.0 for rank in running)
        known.append(rate(steps_per_s, "steps"))
        # What no rank reports is not shown.
        samples_per_s = sum(rank.samples_per_s or 0.0 for rank in running)
        tokens_per_s = sum(rank.tokens_per_s or 0.0 for rank in running)
        known.extend([rate(samples_per_s, "samples")] if samples_per_s else [])
        known.extend([rate(tokens_per_s, "tokens")] if tokens_per_s else [])
    for method, ratio in job.model_flops_ratio.items():
        known.append(f"MFU {percent(ratio)} (by {method})")
    if job.memory_ratio:
        known.append(f"{percent(job.memory_ratio)} of GPU memory")
    if job.energy_j:
        known.append(joules(job.energy_j))
    if job.tokens_per_joule:
        known.append(tokens_per_joule(job.tokens_per_joule))
    return known


def marks(job: JobState, state: State) -> list[int]:
    """The steps since which something is wrong."""
    return [
        anomaly.begin_step
        for anomaly in state.anomalies
        if anomaly.job_id == job.job_id
        and anomaly.end_time is None
        and anomaly.begin_step is not None
    ]
