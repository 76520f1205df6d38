"""Jobs and their ranks."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from warpwatch_runtime.quantities import (
    joules,
    percent,
    plural,
    rate,
    seconds,
    text,
    tokens_per_joule,
)
from warpwatch_serving.page.charts import phase_shares
from warpwatch_serving.page.job_order import RankedJob
from warpwatch_telemetry.state import JobState, RankState

# As many as a node has GPUs; the others are rows.
MAX_DRAWN = 8
MAX_RANK_ROWS = 24
# Rows, unless all are asked for; and then.
MAX_JOBS = 20
MAX_ALL = 4096
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


def cards(found: Sequence[RankedJob]) -> list[tuple[RankedJob, list[RankState]]]:
    """Return the first jobs with the ranks that are drawn, of each job the worst, by number."""
    drawn: list[tuple[RankedJob, list[RankState]]] = []
    left = MAX_DRAWN
    for one in found:
        if left <= 0:
            break
        first = sorted(one.ranks, key=lambda rank: _well(rank, one.named))[:left]
        drawn.append((one, sorted(first, key=lambda rank: rank.rank)))
        left -= max(1, len(first))
    return drawn


def others(one: RankedJob, drawn: Sequence[RankState]) -> list[RankState]:
    """Return the ranks that are not drawn, those in trouble first."""
    shown = {rank.key for rank in drawn}
    left = [rank for rank in one.ranks if rank.key not in shown]
    return sorted(left, key=lambda rank: _well(rank, one.named))


def _well(rank: RankState, named: Collection[int]) -> tuple[bool, bool]:
    """Return the place of a rank in trouble before others, and of one that runs before ended."""
    is_troubled = rank.status in ("died", "stopped") or rank.calls_without_step > 0
    return not is_troubled and rank.rank not in named, rank.status == "exited"


def size(one: RankedJob) -> str:
    """Return how many ranks on how many nodes a job has, and how fast it is."""
    nodes, running = {rank.host for rank in one.ranks}, _running(one.ranks)
    parts = [_count(one.job, one.ranks)]
    parts.extend([plural(len(nodes), "node")] if len(nodes) > 1 else [])
    parts.extend([rate(_pace(running), "steps")] if running else [])
    return " · ".join(parts)


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
    running = _running(ranks)
    known = [text(job.owner, 60), _count(job, ranks)]
    if running:
        known.append(rate(_pace(running), "steps"))
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


def _running(ranks: Sequence[RankState]) -> list[RankState]:
    return [rank for rank in ranks if rank.steps_per_s]


def _count(job: JobState, ranks: Sequence[RankState]) -> str:
    of = f" of {job.world_size}" if job.world_size > len(ranks) else ""
    return f"{plural(len(ranks), 'rank')}{of}"


def _pace(running: Sequence[RankState]) -> float:
    """Return steps per second; ranks step together, so a job is as fast as one of them."""
    return statistics.median(rank.steps_per_s or 0.0 for rank in running)


def marks(one: RankedJob) -> list[int]:
    """The steps since which something is wrong."""
    return [found.begin_step for found in one.anomalies if found.begin_step is not None]
