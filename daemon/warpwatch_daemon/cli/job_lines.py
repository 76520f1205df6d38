"""Jobs as lines of text: one each, and one for each rank that is in trouble or asked for."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from warpwatch_runtime.quantities import (
    no_step,
    percent,
    places,
    plural,
    rate,
    seconds,
    tokens_per_joule,
    uncounted,
)

# Unless all ranks are asked for.
MAX_JOBS = 20
MAX_TROUBLED = 5

Document = Mapping[str, Any]
Key = tuple[str, str, str]


def job_lines(status: Mapping[str, Sequence[Document]], *, all_ranks: bool) -> Iterator[str]:
    """Yield the jobs of ``status``: with an anomaly first, then with a rank in trouble, by size."""
    ranks: dict[Key, list[Document]] = {}
    for rank in status["ranks"]:
        ranks.setdefault((rank["owner"], rank["job"], rank["run"]), []).append(rank)
    active = {
        (one["owner"], one["job"], one["run"])
        for one in status["anomalies"]
        if one["end_time"] is None
    }
    jobs = {(job["owner"], job["name"], job["run"]): job for job in status["jobs"]}

    def place(key: Key) -> tuple[bool, bool, int, Key]:
        of_job = ranks.get(key, [])
        return key not in active, not any(map(_is_troubled, of_job)), -len(of_job), key

    order = sorted({*jobs, *ranks}, key=place)
    names_owners = len({owner for owner, _, _ in order}) > 1
    shown = len(order) if all_ranks else MAX_JOBS
    for key in order[:shown]:
        whose = f" of {key[0]}" if names_owners else ""
        yield from _job(key[1] + whose, jobs.get(key, {}), ranks.get(key, []), all_ranks)
    if order[shown:]:
        yield f"  and {plural(len(order) - shown, 'more job')}: --job, --owner or --ranks"


def _job(name: str, job: Document, ranks: list[Document], all_ranks: bool) -> Iterator[str]:
    ranks.sort(key=lambda rank: rank["rank"])
    yield f"  {name}: {', '.join((_count(ranks), *_pace(ranks), *_efficiency(job)))}"
    troubled = [rank for rank in ranks if _is_troubled(rank)]
    listed = ranks if all_ranks else troubled[:MAX_TROUBLED]
    for rank in listed:
        yield f"    rank {rank['rank']}: {', '.join(_rank(rank))}"
    if not all_ranks and troubled[MAX_TROUBLED:]:
        yield f"    and {plural(len(troubled) - MAX_TROUBLED, 'more rank')} in trouble: --ranks"


def _is_troubled(rank: Document) -> bool:
    # A daemon of the version before has no steps_elsewhere.
    uncounted_steps = rank["calls_without_step"] or rank.get("steps_elsewhere", 0)
    return rank["status"] not in ("running", "exited") or bool(uncounted_steps)


def _count(ranks: Sequence[Document]) -> str:
    found = {"stopped": 0, "died": 0, "exited": 0}
    for rank in ranks:
        if rank["status"] in found:
            found[rank["status"]] += 1
    ended = "".join(f", {count} {status}" for status, count in found.items() if count)
    return plural(len(ranks), "rank") + ended


def _pace(ranks: Sequence[Document]) -> Iterator[str]:
    """Yield how far and how fast the ranks are together; they step together, and input adds up."""
    steps = [rank["step"] for rank in ranks if rank["step"] is not None]
    recent_s = [statistics.median(rank["recent_s"]) for rank in ranks if rank["recent_s"]]
    yield f"step {max(steps)}" if steps else "no step yet"
    if recent_s:
        yield f"median step {seconds(statistics.median(recent_s))}"
    if per_s := [rank["steps_per_s"] for rank in ranks if rank["steps_per_s"]]:
        yield rate(statistics.median(per_s), "steps")
    for what in ("samples", "tokens"):
        if total := sum(rank[f"{what}_per_s"] or 0.0 for rank in ranks):
            yield rate(total, what)
    if clocks := sorted({rank["step_clock"] for rank in ranks if rank["step_clock"]}):
        yield f"step clock {'/'.join(clocks)}"


def _efficiency(job: Document) -> Iterator[str]:
    for method, ratio in job.get("model_flops_ratio", {}).items():
        yield f"MFU {percent(ratio)} (by {method})"
    if memory := job.get("memory_ratio"):
        yield f"tensors take up to {percent(memory)} of a GPU's memory"
    if per_joule := job.get("tokens_per_joule"):
        yield tokens_per_joule(per_joule)


def _rank(rank: Document) -> Iterator[str]:
    reason = rank["silent_reason"]
    said = reason is None or reason in (rank["status"], "unknown")
    yield rank["status"] if said else f"{rank['status']} ({reason})"
    yield f"on {rank['host']}"
    yield f"step {rank['step']}"
    recent_s = rank["recent_s"]
    if recent_s:
        yield f"median step {seconds(statistics.median(recent_s))}"
    else:
        calls = rank["calls_without_step"]
        yield no_step(calls) if calls else "no step yet"
    if elsewhere := rank.get("steps_elsewhere", 0):
        yield uncounted(elsewhere)
    if parallel := places(rank["parallel"]):
        yield parallel
