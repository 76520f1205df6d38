"""Jobs, the worst first, each with a sentence, and their ranks; also those of inference servers."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
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
from warpwatch_serving.page.findings import SEVERITIES, worst_first
from warpwatch_telemetry.anomalies import Anomaly
from warpwatch_telemetry.jobs import JobId
from warpwatch_telemetry.state import JobState, RankState, ServeState, State

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
    sentence, is_slow = _sentence(ranks, own_times(computing(ranks)))
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
        name, status = process_name(gone[0]), _TROUBLED[gone[0].status]
        return f"{name[0].upper()}{name[1:]} on {hosts[gone[0].rank]} {status}{more}", True
    median_s = statistics.median(own_s.values()) if own_s else 0.0
    if not median_s:
        return "", False
    if len(own_s) == 1:
        return f"{seconds(median_s)} per {'iteration' if ranks[0].serve else 'step'}", False
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


# As many as a node has GPUs; the others are rows.
MAX_DRAWN = 8
MAX_RANK_ROWS = 24
# Rows, unless all are asked for; and then.
MAX_JOBS = 20
MAX_ALL = 4096
# The words for a rank without a heartbeat, by its silent_reason.
SILENCE = {
    "stopped": "stopped by a signal, a debugger or a frozen container",
    "holds the GIL": "a C call holds the GIL: no other thread runs",
}
# The numbers beside a chart are of this many newest steps.
RECENT_STEPS = 20


class LegendEntry(NamedTuple):
    """A phase; ``share``: its part of the ranks' time, on average."""

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
    ranks = computing(one.ranks)
    nodes, running = {rank.host for rank in one.ranks}, _running(ranks)
    parts = [_count(one.job, ranks)]
    parts.extend([plural(len(nodes), "node")] if len(nodes) > 1 else [])
    if _is_idle(one.ranks):
        parts.append("idle")
    elif running:
        what = "iterations" if one.job.kind == "serve" else "steps"
        parts.append(rate(_pace(running), what))
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
    """Return the phases of these ranks, each with its colour."""
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
    """Return owner, ranks and rates of a job."""
    if job.kind == "serve":
        return _server_facts(job, ranks)
    running = _running(ranks)
    known = [text(job.owner, 60), _count(job, ranks)]
    if running:
        known.append(rate(_pace(running), "steps"))
        # A rate that no rank reports is not shown.
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
    # A server's world size also counts its scheduler and front end.
    is_partial = job.world_size > len(ranks) and job.kind != "serve"
    of = f" of {job.world_size}" if is_partial else ""
    return f"{plural(len(ranks), 'rank')}{of}"


def _pace(running: Sequence[RankState]) -> float:
    """Return steps per second; ranks step together, so a job is as fast as one of them."""
    return statistics.median(rank.steps_per_s or 0.0 for rank in running)


def marks(one: RankedJob) -> list[int]:
    """Return the steps since which something is wrong."""
    return [found.begin_step for found in one.anomalies if found.begin_step is not None]


# --- inference servers ---

ROLES = {"rank": "rank", "scheduler": "scheduler", "frontend": "front end"}


def process_name(rank: RankState) -> str:
    """Return the name of a process: ``rank 3``, and in a server also ``scheduler 4``."""
    role = ROLES.get(rank.serve.role, "rank") if rank.serve else "rank"
    return f"{role} {text(rank.name, 24)}"


def computing(ranks: Sequence[RankState]) -> list[RankState]:
    return [rank for rank in ranks if rank.computes]


def _server_facts(job: JobState, ranks: Sequence[RankState]) -> list[str]:
    """Return owner, replica, processes, requests and rates of a server."""
    workers = computing(ranks)
    others = len(ranks) - len(workers)
    known = [text(job.owner, 60), f"replica {text(job.replica, 60)}", plural(len(workers), "rank")]
    known.extend([f"{plural(others, 'more process', 'more processes')}"] if others else [])
    known.extend(_load(ranks))
    running = _running(workers)
    if running and not _is_idle(ranks):
        known.append(rate(_pace(running), "iterations"))
    programs = sorted({rank.serve.server for rank in ranks if rank.serve} - {""})
    return [*known, *(text(program, 60) for program in programs)]


def _engines(ranks: Sequence[RankState]) -> list[ServeState]:
    """Return the processes that know the requests of their engine."""
    return [rank.serve for rank in ranks if rank.serve and rank.serve.running is not None]


def _is_idle(ranks: Sequence[RankState]) -> bool:
    engines = _engines(ranks)
    return bool(engines) and all(engine.idle for engine in engines)


def _load(ranks: Sequence[RankState]) -> list[str]:
    """Return the requests of all engines, and the use of the fullest KV cache."""
    engines = _engines(ranks)
    if not engines:
        return []
    if _is_idle(ranks):
        return ["idle"]
    running = sum(engine.running or 0 for engine in engines)
    waiting = sum(engine.waiting or 0 for engine in engines)
    usages = [engine.kv_usage for engine in engines if engine.kv_usage is not None]
    cache = [f"KV cache {percent(max(usages))} used"] if usages else []
    return [f"{running} running", f"{waiting} waiting", *cache]


def server_notes(ranks: Sequence[RankState]) -> list[str]:
    """Return what the hooks of a server cannot report, each reason once."""
    return [text(one, 160) for one in sorted({r.serve.note for r in ranks if r.serve} - {""})]
