"""The JSON API: the current state, requests for captures, their files, and alerts."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import anyio.to_thread
from anyio import CapacityLimiter
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import FileResponse, Response, StreamingResponse

from warpwatch_detection.detector import DetectorStatus
from warpwatch_serving import answers, bodies
from warpwatch_serving.access import Access, caller_of
from warpwatch_serving.answers import AlertAnswers, HttpError, json_answer
from warpwatch_serving.backend import ApiBackend, may_see, visible
from warpwatch_serving.bodies import AlertmanagerPayload, filters, json_body
from warpwatch_telemetry.alerts import NotReadyError, plain
from warpwatch_telemetry.anomalies import Detected
from warpwatch_telemetry.captures import Capture
from warpwatch_telemetry.errors import Refused
from warpwatch_telemetry.state import State

# The status of a refusal by its reason. All other reasons are conflicts with something that runs.
_REFUSED_STATUS = {"not_found": 404, "refused_no_rank": 404, "refused_disk": 503, "no_memory": 503}
_CONFLICT = 409

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._#-]{0,199}")
# By the end of the name; the first match counts.
_TYPES = (
    (".gz", "application/gzip"),
    (".json", "application/json"),
    (".html", "text/html; charset=utf-8"),
    (".txt", "text/plain; charset=utf-8"),
    ("", "application/octet-stream"),
)
# The browser shows these files, but no traces, and downloads all others.
_SHOWN = (".html", ".txt", ".json")
_REPORT_POLICY = (
    "sandbox; default-src 'none'; style-src 'unsafe-inline'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
# Webhooks that are being answered: each may hold a body in memory.
MAX_AT_ONCE = 16
# The reply lists this many answers and counts the others.
MAX_ANSWERS = 1000
# The backend answers one webhook at a time anyway.
WORKERS = 2
# Alertmanager sends a refused notification again only after a status of 500 and above.
_RETRY = {"Retry-After": "1"}


class JsonApi:
    """The endpoints, a method each; their docstrings are summaries in `/openapi.json`."""

    def __init__(self, backend: ApiBackend, access: Access) -> None:
        self._backend = backend
        self._access = access
        # The webhooks that are being answered; the limiter needs a running loop.
        self._webhooks = 0
        self._alert_workers: CapacityLimiter | None = None

    async def healthz(self, request: Request) -> Response:
        """Whether the process lives."""
        port = request.app.state.port
        return json_answer(answers.Health(version=self._backend.overview().version, port=port))

    async def readyz(self, request: Request) -> Response:
        """Whether every source can be read."""
        missing = self._backend.missing()
        sources = self._backend.overview().sources
        document = answers.Readiness(ready=not missing, missing=missing, sources=sources)
        return json_answer(document, 503 if missing else 200)

    async def devices(self, request: Request) -> Response:
        """Devices with their newest values."""
        filters(request, bodies.Filters)
        devices = [answers.DeviceReport.of(sample) for sample in self._backend.overview().devices]
        return json_answer(answers.DeviceList(devices=devices))

    async def ranks(self, request: Request) -> Response:
        """Ranks with their newest steps."""
        wanted = filters(request, bodies.JobFilters)
        ranks = [
            rank
            for rank in visible(self._backend.state(), caller_of(request).owner).ranks
            if wanted.admits(job=rank.job, owner=rank.owner)
        ]
        return json_answer(answers.RankList(ranks=ranks))

    async def jobs(self, request: Request) -> Response:
        """Jobs."""
        wanted = filters(request, bodies.JobFilters)
        state = self._overview(request)
        jobs = [job for job in state.jobs if wanted.admits(job=job.name, owner=job.owner)]
        return json_answer(answers.JobList(jobs=jobs))

    async def anomalies(self, request: Request) -> Response:
        """Anomalies, each with what became of its trigger."""
        wanted = filters(request, bodies.AnomalyFilters)
        state = self._overview(request)
        decided = {decision.anomaly_id: decision for decision in state.decisions}
        anomalies = [
            answers.AnomalyReport.of(anomaly, state.hostname, decided.get(anomaly.id))
            for anomaly in state.anomalies
            if wanted.admits(job=anomaly.job, owner=anomaly.owner, kind=anomaly.kind)
            and wanted.admits(active=anomaly.end_time is None)
        ]
        return json_answer(answers.AnomalyList(anomalies=anomalies))

    async def anomaly(self, request: Request) -> Response:
        """One anomaly, also of the history, with the metrics of the minutes around it."""
        filters(request, bodies.Filters)
        ident, state = request.path_params["id"], self._overview(request)
        found = next((one for one in state.anomalies if one.id == ident), None)
        context = state.contexts.get(ident)
        if found is None or context is None:
            stored = await run_in_threadpool(self._backend.anomaly, ident)
            owner = caller_of(request).owner
            if stored is not None and (owner is None or may_see(stored[0], owner)):
                found, context = found or stored[0], stored[1]
        if found is None:
            raise HttpError(404, "not_found", "there is no such anomaly")
        decision = next((one for one in state.decisions if one.anomaly_id == ident), None)
        report = answers.AnomalyInContext.of(found, state.hostname, decision, context=context)
        return json_answer(report)

    async def detectors(self, request: Request) -> Response:
        """How the detectors see what they judge, and why."""
        wanted = filters(request, bodies.DetectorFilters)
        statuses, suppressed = await run_in_threadpool(self._backend.detector_statuses)
        caller = caller_of(request)

        def seen(one: DetectorStatus | Detected) -> bool:
            is_visible = caller.owner is None or one.job is None or one.owner == caller.owner
            return is_visible and wanted.admits(job=one.job, owner=one.owner)

        detectors = [
            answers.DetectorReport(
                kind=kind,
                readings=[one for one in readings if seen(one)],
            )
            for kind, readings in statuses.items()
            if wanted.admits(kind=kind)
        ]
        admitted = [
            answers.SuppressedReport.of(one)
            for one in suppressed
            if wanted.admits(kind=one.kind) and seen(one.found)
        ]
        return json_answer(answers.DetectorList(detectors=detectors, suppressed=admitted))

    async def captures(self, request: Request) -> Response:
        """Captures."""
        wanted = filters(request, bodies.CaptureFilters)
        captures = [
            capture
            for capture in self._captures(request, wanted)
            if wanted.admits(active=capture.outcome is None)
        ]
        return json_answer(answers.CaptureList(captures=captures))

    async def runs(self, request: Request) -> Response:
        """Summaries of runs, current and ended."""
        wanted, owner = filters(request, bodies.RunFilters), caller_of(request).owner
        runs = [
            run
            for run in await run_in_threadpool(self._backend.run_summaries)
            if owner in (None, run.owner)
            and wanted.admits(job=run.job, owner=run.owner, run=run.run)
            and wanted.admits(active=run.end_time is None)
        ]
        return json_answer(answers.RunList(runs=runs))

    async def diagnoses(self, request: Request) -> Response:
        """The diagnoses of the captures' traces."""
        diagnoses = [
            answers.DiagnosisReport(
                capture=capture.id,
                job=capture.request.job,
                owner=capture.request.owner,
                time=capture.time,
                outcome=capture.diagnosis_outcome,
                diagnosis=capture.diagnosis,
            )
            for capture in self._captures(request, filters(request, bodies.DiagnosisFilters))
            if capture.diagnosis is not None
        ]
        return json_answer(answers.DiagnosisList(diagnoses=diagnoses))

    async def capture(self, request: Request) -> Response:
        """One capture."""
        for capture in self._overview(request).captures:
            if capture.id == request.path_params["id"]:
                return json_answer(capture)
        raise HttpError(404, "not_found", "there is no such capture")

    async def request_capture(self, request: Request) -> Response:
        """Ask for a capture."""
        owner = self._access.check_captures(request).owner
        body = await json_body(request, bodies.CaptureBody)
        if body.is_of_a_fleet:
            self._access.check_all_jobs(request, "id, start_step and anomaly_id")
        if owner is not None and body.owner not in ("", owner):
            # Otherwise the caller's own job of the same name would be captured.
            raise HttpError(404, "refused_no_rank", f"{owner} may not capture jobs of {body.owner}")
        with refusals():
            # Not in the event loop: it may wait for another capture to start.
            capture = await run_in_threadpool(self._begin, body, owner)
        location = {"Location": f"/api/v1/captures/{capture.id}"}
        return json_answer(capture, 202, location)

    async def capture_file(self, request: Request) -> Response:
        """A file of a capture."""
        caller = self._access.check_captures(request)
        capture_id, name = request.path_params["id"], request.path_params["file"]
        found = None
        if _NAME.fullmatch(capture_id) and _NAME.fullmatch(name):
            # Not in the event loop: the disk of the store or another node may be slow.
            try:
                found = await run_in_threadpool(self._find_file, capture_id, name, caller.owner)
            except Refused as error:
                raise HttpError(503, error.reason, str(error)) from error
        if found is None:
            raise HttpError(404, "not_found", "there is no such capture or file")
        headers = _headers(name)
        if isinstance(found, Path):
            return FileResponse(found, headers=headers)
        # The file comes from another node, so a browser must neither show it nor run its scripts.
        headers["Content-Disposition"] = f'attachment; filename="{name}"'
        return StreamingResponse(found, headers=headers | {"Content-Security-Policy": "sandbox"})

    async def alertmanager(self, request: Request) -> Response:
        """Alerts that fire ask for captures."""
        # 503 only if a retry can help; it captures nothing twice, as alerts are remembered.
        if not self._access.check_captures(request).all_jobs:
            raise HttpError(403, "not_root", "alerts ask for everybody's jobs: only root may")
        if self._webhooks >= MAX_AT_ONCE:
            raise HttpError(503, "busy", "too many webhooks are being answered", _RETRY)
        self._webhooks += 1
        try:
            return await self._answer_alerts(request)
        except NotReadyError as error:
            raise HttpError(503, "starting", str(error), _RETRY) from error
        finally:
            self._webhooks -= 1

    async def _answer_alerts(self, request: Request) -> Response:
        alerts = (await json_body(request, AlertmanagerPayload)).alerts
        own = plain(str((request.scope.get("server") or ("",))[0]))
        if self._alert_workers is None:
            self._alert_workers = CapacityLimiter(WORKERS)
        # Not in the event loop: it waits for captures to start.
        work = partial(self._backend.receive_alerts, alerts, own)
        answers = await anyio.to_thread.run_sync(work, limiter=self._alert_workers)
        received = self._backend.metrics.counter("alerts_received_total")
        for outcome, count in Counter(answer.outcome for answer in answers).items():
            received.labels(outcome).inc(count)
        listed, unlisted = answers[:MAX_ANSWERS], max(0, len(answers) - MAX_ANSWERS)
        return json_answer(AlertAnswers(alerts=list(listed), unlisted=unlisted))

    def _begin(self, body: bodies.CaptureBody, owner: str | None) -> Capture:
        if body.is_of_a_fleet:
            raise Refused("refused_disabled", "a fleet chooses id, start_step and anomaly itself")
        return self._backend.request_capture(body.request(owner))

    def _overview(self, request: Request) -> State:
        return visible(self._backend.overview(), caller_of(request).owner)

    def _captures(self, request: Request, wanted: bodies.DiagnosisFilters) -> Iterable[Capture]:
        return (
            capture
            for capture in self._overview(request).captures
            if wanted.admits(
                job=capture.request.job, owner=capture.request.owner, kind=capture.request.kind
            )
        )

    def _find_file(
        self, capture: str, name: str, owner: str | None
    ) -> Path | Iterator[bytes] | None:
        found = self._backend.capture_file(capture, name, owner)
        is_plain = not isinstance(found, Path) or (found.is_file() and not found.is_symlink())
        return found if is_plain else None


@contextmanager
def refusals() -> Iterator[None]:
    """Answer a refusal with the status of its reason."""
    try:
        yield
    except Refused as error:
        status = _REFUSED_STATUS.get(error.reason, _CONFLICT)
        raise HttpError(status, error.reason, str(error)) from error


def _headers(name: str) -> dict[str, str]:
    headers = {"Content-Type": next(kind for end, kind in _TYPES if name.endswith(end))}
    if name.endswith(".pt.trace.json") or not name.endswith(_SHOWN):
        headers["Content-Disposition"] = f'attachment; filename="{name}"'
    if name.endswith(".html"):
        headers["Content-Security-Policy"] = _REPORT_POLICY
    return headers
