"""`warpwatch status`: show jobs, anomalies and captures of a daemon."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import urlencode

import msgspec

from warpwatch._version import __version__
from warpwatch_daemon.api_client import ApiClient
from warpwatch_daemon.cli import parsing
from warpwatch_runtime import command_line
from warpwatch_runtime.command_line import say
from warpwatch_runtime.quantities import no_step, places, plural, uncounted
from warpwatch_serving.answers import AnomalyReport, DeviceReport
from warpwatch_serving.page import captures, findings, jobs
from warpwatch_telemetry.anomalies import Anomaly
from warpwatch_telemetry.captures import Capture
from warpwatch_telemetry.errors import WarpwatchError
from warpwatch_telemetry.samples import SourceHealth
from warpwatch_telemetry.state import JobState, RankState, State

_OF_JOBS = ("jobs", "ranks", "anomalies", "captures")
# A daemon of the version before does not send these of an anomaly.
_SINCE_0_3: Mapping[str, Any] = {"decision": None, "scope": "job"}


def read_lists(api: ApiClient, query: str = "") -> dict[str, Any]:
    """Return the lists of the API by name, those of jobs filtered. Raises WarpwatchError."""
    lists: dict[str, Any] = {"devices": api.get("/api/v1/devices")["devices"]}
    lists |= {name: api.get(f"/api/v1/{name}{query}")[name] for name in _OF_JOBS}
    return lists | {"sources": api.get("/readyz", accepted=503)["sources"]}


def to_state(lists: Mapping[str, Any], now: float) -> State:
    """Return the state that the lists describe; its anomalies are AnomalyReports.

    now: wall clock, seconds. Raises WarpwatchError.
    """
    anomalies = [{"sentence": one["summary"], **_SINCE_0_3, **one} for one in lists["anomalies"]]
    try:
        devices = msgspec.convert(lists["devices"], list[DeviceReport])
        return State(
            now,
            __version__,
            "",
            devices=tuple(device.sample() for device in devices),
            sources=msgspec.convert(lists["sources"], tuple[SourceHealth, ...]),
            ranks=msgspec.convert(lists["ranks"], tuple[RankState, ...]),
            jobs=msgspec.convert(lists["jobs"], tuple[JobState, ...]),
            anomalies=msgspec.convert(anomalies, tuple[AnomalyReport, ...]),
            captures=msgspec.convert(lists["captures"], tuple[Capture, ...]),
        )
    except msgspec.ValidationError as error:
        raise WarpwatchError(f"the answer has another form: {error}") from error


# The limits without --ranks.
MAX_JOBS = 20
MAX_TROUBLED = 5
# An operator may look after an alert is over.
MAX_ENDED = 5
MAX_ACTIVE = 20
MAX_CAPTURES = 5


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
    lists = _read(parsing.api(arguments), arguments.job, arguments.owner)
    state = to_state(lists, wall())
    if arguments.json:
        say(json.dumps(lists, indent=1))
    else:
        all_ranks = arguments.ranks or arguments.job is not None
        say("\n".join(_lines(state, lists["blind"], all_ranks)))
    return int(any(one.severity != "info" for one in findings.worst_first(state)))


def _read(api: ApiClient, job: str | None, owner: str | None) -> dict[str, Any]:
    given = {name: value for name, value in (("job", job), ("owner", owner)) if value is not None}
    query = f"?{urlencode(given)}" if given else ""
    lists = read_lists(api, query)
    lists["blind"] = [
        {"kind": detector["kind"], **one}
        for detector in api.get(f"/api/v1/detectors{query}")["detectors"]
        for one in detector["readings"]
        if one["blind"]
    ]
    return lists


def _lines(state: State, blind: Sequence[dict[str, Any]], all_ranks: bool) -> Iterator[str]:
    yield from _sources(state)
    active = findings.worst_first(state)
    ended = [anomaly for anomaly in state.anomalies if anomaly.end_time is not None]
    for anomaly in active[:MAX_ACTIVE]:
        yield anomaly_line(anomaly, state)
    if active[MAX_ACTIVE:]:
        yield f"  and {plural(len(active) - MAX_ACTIVE, 'more anomaly', 'more anomalies')}: --json"
    for anomaly in sorted(ended, key=lambda one: -(one.end_time or 0.0))[:MAX_ENDED]:
        yield anomaly_line(anomaly, state)
    for one in blind[:MAX_ACTIVE]:
        yield f"  {one['kind']} of {one['job']} is blind: {one['text']}"
    up = sum(1 for device in state.devices if device.up)
    of_jobs = f"{plural(len(state.ranks), 'rank')} of {plural(len(state.jobs), 'job')}"
    yield f"{up} of {plural(len(state.devices), 'device')} up, {of_jobs}"
    yield from _jobs(state, all_ranks)
    for capture in state.captures[-MAX_CAPTURES:]:
        yield capture_line(capture)


def _sources(state: State) -> Iterator[str]:
    """Yield sources that cannot be read; ``!``: a fleet does not see an agent."""
    agents = findings.unseen(state.sources)
    if agents.sentence:
        yield f"! {agents.sentence}"
    yield from (f"  {note}" for note in agents.notes)
    for source in state.sources:
        if not source.up and source.lag_s is None:
            yield f"  {source.name} cannot be read: {source.reason or 'no reason known'}"


def _jobs(state: State, all_ranks: bool) -> Iterator[str]:
    """Yield the jobs in the order of the page, each with its ranks in trouble."""
    found = jobs.ranked(state)
    shown = found if all_ranks else found[:MAX_JOBS]
    for one in shown:
        facts = (*jobs.facts(one.job, one.ranks), *_versions(one.ranks, state.version))
        sentence = f"; {one.sentence}" if one.sentence else ""
        yield f"  {one.job.name}: {', '.join(filter(None, facts))}{sentence}"
        troubled = [rank for rank in one.ranks if _is_troubled(rank)]
        for rank in one.ranks if all_ranks else troubled[:MAX_TROUBLED]:
            yield f"    {jobs.process_name(rank)}: {', '.join(_rank(rank))}"
        if not all_ranks and troubled[MAX_TROUBLED:]:
            yield f"    and {plural(len(troubled) - MAX_TROUBLED, 'more rank')} in trouble: --ranks"
    if found[len(shown) :]:
        yield f"  and {plural(len(found) - MAX_JOBS, 'more job')}: --job, --owner or --ranks"


def _versions(ranks: Sequence[RankState], own: str) -> Iterator[str]:
    """Yield the newest step, the clocks of steps, and the versions of other shims.

    For a server, yield what its hooks cannot report instead of steps.
    """
    served = [rank for rank in ranks if rank.serve is not None]
    yield from jobs.server_notes(served)
    if not served:
        steps = [rank.step for rank in ranks if rank.step is not None]
        yield f"step {max(steps)}" if steps else "no step yet"
        if clocks := sorted({rank.step_clock for rank in ranks} - {""}):
            yield f"step clock {'/'.join(clocks)}"
    if shims := sorted({rank.client for rank in ranks} - {"", own}):
        yield f"shim {'/'.join(shims)}"


def _is_troubled(rank: RankState) -> bool:
    uncounted_steps = rank.calls_without_step or rank.steps_elsewhere
    return rank.status not in ("running", "exited") or bool(uncounted_steps)


def _rank(rank: RankState) -> Iterator[str]:
    reason = rank.silent_reason
    said = reason is None or reason in (rank.status, "unknown")
    yield rank.status if said else f"{rank.status} ({reason})"
    yield f"on {rank.host}"
    if rank.serve is not None:
        if rank.recent_s:
            yield f"median iteration {jobs.median(rank)}"
        elif rank.computes:
            yield "no iteration yet"
        return
    if rank.step is not None:
        yield f"step {rank.step}"
    if rank.recent_s:
        yield f"median step {jobs.median(rank)}"
    else:
        calls = rank.calls_without_step
        yield no_step(calls) if calls else "no step yet"
    if rank.steps_elsewhere:
        yield uncounted(rank.steps_elsewhere)
    if parallel := places(rank.parallel):
        yield parallel


def anomaly_line(anomaly: Anomaly, state: State) -> str:
    """Return a line of an AnomalyReport; ``!``: active, and more than information."""
    mark = "!" if anomaly.end_time is None and anomaly.severity != "info" else " "
    said = anomaly.sentence if isinstance(anomaly, AnomalyReport) else anomaly.summary
    return f"{mark} {anomaly.kind}, {findings.when(anomaly, state)}: {said}"


def capture_line(capture: Capture) -> str:
    explanation = captures.describe(capture)
    said = ": ".join(filter(None, (explanation.verdict or "no diagnosis", explanation.reason)))
    copy = f", at {capture.remote}" if capture.remote else ""
    about = f"{capture.id} of {capture.request.job}"
    return f"  capture {about}: {captures.outcome(capture)}, {said}{copy}"
