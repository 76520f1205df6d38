"""`warpwatch status`: what a running daemon sees."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

import msgspec

from warpwatch_daemon.cli import parsing
from warpwatch_daemon.cli.job_lines import job_lines
from warpwatch_runtime import command_line
from warpwatch_runtime.command_line import say
from warpwatch_runtime.quantities import ago, plural
from warpwatch_serving.page.agents import unseen
from warpwatch_serving.page.headline import SEVERITIES
from warpwatch_telemetry.samples import SourceHealth

if TYPE_CHECKING:
    from warpwatch_daemon.api_client import ApiClient

# Who comes because of an alert may come when all is over.
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
        yield f"  {one['kind']} of {one['job']} is blind to what it is to find: {one['text']}"
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
    """Yield what cannot be read; ``!``: a fleet does not see an agent."""
    sources = msgspec.convert(documents, list[SourceHealth])
    agents = unseen(sources)
    if agents.sentence:
        yield f"! {agents.sentence}"
    yield from (f"  {note}" for note in agents.notes)
    for source in sources:
        if not source.up and source.lag_s is None:
            yield f"  {source.name} cannot be read: {source.reason or 'no reason known'}"


def anomaly_line(anomaly: Mapping[str, Any], now: float) -> str:
    """``!``: it is active, and more than information. ``now``: wall clock, seconds."""
    end_time = anomaly["end_time"]
    mark = "!" if end_time is None and anomaly["severity"] != "info" else " "
    when = (
        f"found {ago(anomaly['time'], now)}" if end_time is None else f"over {ago(end_time, now)}"
    )
    # A daemon of the version before has no sentence.
    said = anomaly.get("sentence", anomaly["summary"])
    return f"{mark} {anomaly['kind']}, {when}: {said}"
