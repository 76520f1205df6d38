"""Shows the job of an inference server: its requests, its processes, and what is not seen of it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from warpwatch_runtime.quantities import percent, plural, rate, text
from warpwatch_telemetry.state import JobState, RankState

ROLES = {"rank": "rank", "scheduler": "scheduler", "frontend": "front end"}


def name(rank: RankState) -> str:
    """Return the name of a process: ``rank 3``, and in a server also ``scheduler 4``."""
    role = ROLES.get(rank.serve.role, "rank") if rank.serve else "rank"
    return f"{role} {text(rank.name, 24)}"


def computing(ranks: Sequence[RankState]) -> list[RankState]:
    """Return the ranks with steps or iterations of their own: no scheduler and front end."""
    return [rank for rank in ranks if rank.serve is None or rank.serve.role == "rank"]


def facts(job: JobState, ranks: Sequence[RankState]) -> list[str]:
    """Return owner, replica, processes, requests and rates of a server."""
    workers = computing(ranks)
    others = len(ranks) - len(workers)
    known = [text(job.owner, 60), f"replica {text(job.replica, 60)}", plural(len(workers), "rank")]
    known.extend([f"{plural(others, 'more process', 'more processes')}"] if others else [])
    known.extend(_load(ranks))
    pace = [rank.steps_per_s for rank in workers if rank.steps_per_s]
    if pace and "idle" not in known:
        known.append(rate(statistics.median(pace), "iterations"))
    programs = sorted({rank.serve.server for rank in ranks if rank.serve} - {""})
    return [*known, *(text(program, 60) for program in programs)]


def _load(ranks: Sequence[RankState]) -> list[str]:
    """Return the requests of all engines, and the use of the fullest KV cache."""
    engines = [rank.serve for rank in ranks if rank.serve and rank.serve.running is not None]
    if not engines:
        return []
    if all(engine.idle for engine in engines):
        return ["idle"]
    running = sum(engine.running or 0 for engine in engines)
    waiting = sum(engine.waiting or 0 for engine in engines)
    usage = max((engine.kv_usage or 0.0 for engine in engines), default=0.0)
    return [f"{running} running", f"{waiting} waiting", f"KV cache {percent(usage)} used"]


def notes(ranks: Sequence[RankState]) -> list[str]:
    """Return what the hooks of a server cannot report, each reason once."""
    return [text(one, 160) for one in sorted({r.serve.note for r in ranks if r.serve} - {""})]
