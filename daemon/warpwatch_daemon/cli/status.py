"""`warpwatch status`: show jobs, anomalies and captures of a daemon."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

import msgspec

from warpwatch._version import __version__
from warpwatch_daemon.cli import parsing
from warpwatch_runtime import command_line
from warpwatch_runtime.command_line import say
from warpwatch_runtime.quantities import (
    ago,
    no_step,
    percent,
    places,
    plural,
    rate,
    seconds,
    tokens_per_joule,
    uncounted,
)
from warpwatch_serving.page.findings import SEVERITIES, unseen
from warpwatch_telemetry.samples import SourceHealth

if TYPE_CHECKING:
    from warpwatch_daemon.api_client import ApiClient

# The limits without --ranks.
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
    """Yield the progress and pace of all ranks: they step together, and input adds up."""
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
    # A daemon of the version before has no client.
    if shims := sorted({rank.get("client", "") for rank in ranks} - {"", __version__}):
        yield f"shim {'/'.join(shims)}"


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


# An operator may look after an alert is over.
MAX_ENDED = 5
MAX_ACTIVE = 20
PARTS = ("jobs", "ranks", "anomalies", "captures")


def main(argv: Sequence[str], wall: Callable[[], float] = time.time) -> int:
    command = command_line.parser(
        "status",
        "Anomalies, the worst first, then devices, jobs and captures of a running daemon or fleet. "
        "Exit 1 when an anomaly is active that is more than information.",
        "warpwatch status --url http://127.0.0.1:9400 --job llama-70b",
    )
    parsing.add_daemon(command)
    command.add_argument("--job", help="of this job only, with all its ranks")
    command.add_argument("--owner", help="of this owner's jobs only: uid/1000, ns/team")
    command.add_argument(
        "--ranks", action="store_true", help="all jobs and ranks, not only those in trouble"
    )
    command_line.add_json(command)
    arguments = command.parse_args(argv)
    status = _read(parsing.api(arguments), arguments.job, arguments.owner)
    active = [anomaly for anomaly in status["anomalies"] if anomaly["end_time"] is None]
    active.sort(key=lambda one: (SEVERITIES.index(one["severity"]), -one["time"]))
    serious = [anomaly for anomaly in active if anomaly["severity"] != "info"]
    if arguments.json:
        say(json.dumps(status, indent=1))
    else:
        all_ranks = arguments.ranks or arguments.job is not None
        say("\n".join(_lines(status, active, wall(), all_ranks)))
    return 1 if serious else 0


def _read(api: ApiClient, job: str | None, owner: str | None) -> dict[str, Any]:
    given = {name: value for name, value in (("job", job), ("owner", owner)) if value is not None}
    query = f"?{urlencode(given)}" if given else ""
    status: dict[str, Any] = {"devices": api.get("/api/v1/devices")["devices"]}
    status |= {part: api.get(f"/api/v1/{part}{query}")[part] for part in PARTS}
    status["sources"] = api.get("/readyz", accepted=503)["sources"]
    status["blind"] = [
        {"kind": detector["kind"], **reading}
        for detector in api.get(f"/api/v1/detectors{query}")["detectors"]
        for reading in detector["readings"]
        if reading["blind"]
    ]
    return status


def _lines(status: dict[str, Any], active: list[Any], now: float, all_ranks: bool) -> Iterator[str]:
    yield from _sources(status["sources"])
    ended = [anomaly for anomaly in status["anomalies"] if anomaly["end_time"] is not None]
    for anomaly in active[:MAX_ACTIVE]:
        yield anomaly_line(anomaly, now)
    if active[MAX_ACTIVE:]:
        yield f"  and {plural(len(active) - MAX_ACTIVE, 'more anomaly', 'more anomalies')}: --json"
    for anomaly in sorted(ended, key=lambda one: -one["end_time"])[:MAX_ENDED]:
        yield anomaly_line(anomaly, now)
    for one in status["blind"][:MAX_ACTIVE]:
        yield f"  {one['kind']} of {one['job']} is blind: {one['text']}"
    devices, ranks, jobs = status["devices"], status["ranks"], status["jobs"]
    up = sum(1 for device in devices if device["up"])
    of_jobs = f"{plural(len(ranks), 'rank')} of {plural(len(jobs), 'job')}"
    yield f"{up} of {plural(len(devices), 'device')} up, {of_jobs}"
    yield from job_lines(status, all_ranks=all_ranks)
    for capture in status["captures"][-5:]:
        diagnosis = capture["diagnosis"] or {}
        without = "the fleet has its verdict" if capture.get("of_fleet") else "no diagnosis"
        verdict = diagnosis.get("verdict", without)
        about = f"{capture['id']} of {capture['request']['job']}"
        copy = f", at {capture['remote']}" if capture["remote"] else ""
        yield f"  capture {about}: {capture['outcome'] or 'running'}, {verdict}{copy}"


def _sources(documents: list[dict[str, Any]]) -> Iterator[str]:
    """Yield sources that cannot be read; ``!``: a fleet does not see an agent."""
    sources = msgspec.convert(documents, list[SourceHealth])
    agents = unseen(sources)
    if agents.sentence:
        yield f"! {agents.sentence}"
    yield from (f"  {note}" for note in agents.notes)
    for source in sources:
        if not source.up and source.lag_s is None:
            yield f"  {source.name} cannot be read: {source.reason or 'no reason known'}"


def anomaly_line(anomaly: Mapping[str, Any], now: float) -> str:
    """Return a line; ``!``: active, and more than information. ``now``: wall clock, seconds."""
    end_time = anomaly["end_time"]
    mark = "!" if end_time is None and anomaly["severity"] != "info" else " "
    when = (
        f"found {ago(anomaly['time'], now)}" if end_time is None else f"over {ago(end_time, now)}"
    )
    # A daemon of the version before has no sentence.
    said = anomaly.get("sentence", anomaly["summary"])
    return f"{mark} {anomaly['kind']}, {when}: {said}"
