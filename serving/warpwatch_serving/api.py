"""The JSON API: what is known, and asking for a capture."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from warpwatch_detection.detector import DetectorStatus
from warpwatch_serving import bodies, models
from warpwatch_serving.access import Access, caller_of, may_see, visible
from warpwatch_serving.answers import ApiError, json_answer
from warpwatch_serving.request_data import filters, json_body
from warpwatch_serving.watcher import Watcher
from warpwatch_telemetry.anomalies import Anomaly, Detected, scope_of, sentence
from warpwatch_telemetry.captures import Capture
from warpwatch_telemetry.errors import Refused
from warpwatch_telemetry.state import State

# The status of a refusal by its reason; what is not here is a conflict with what goes on.
_REFUSED_STATUS = {"not_found": 404, "refused_no_rank": 404, "refused_disk": 503, "no_memory": 503}
_CONFLICT = 409


class Api:
    """One method a route. Answers are documents of the newest state."""

    def __init__(self, watcher: Watcher, access: Access) -> None:
        self._watcher = watcher
        self._access = access

    async def healthz(self, request: Request) -> Response:
        """Whether the process lives."""
        port = request.app.state.port
        return json_answer(models.Health(version=self._watcher.state().version, port=port))

    async def readyz(self, request: Request) -> Response:
        """Whether every source can be read."""
        missing = self._watcher.missing()
        sources = self._watcher.state().sources
        document = models.Readiness(ready=not missing, missing=missing, sources=sources)
        return json_answer(document, 503 if missing else 200)

    async def devices(self, request: Request) -> Response:
        """Devices with their newest values."""
        filters(request, models.Filters)
        devices = [models.DeviceReport.of(sample) for sample in self._watcher.state().devices]
        return json_answer(models.DeviceList(devices=devices))

    async def ranks(self, request: Request) -> Response:
        """Ranks with their newest steps."""
        wanted = filters(request, models.JobFilters)
        ranks = [
            rank
            for rank in self._state(request).ranks
            if wanted.admits(job=rank.job, owner=rank.owner)
        ]
        return json_answer(models.RankList(ranks=ranks))

    async def jobs(self, request: Request) -> Response:
        """Jobs."""
        wanted = filters(request, models.JobFilters)
        state = self._state(request)
        jobs = [job for job in state.jobs if wanted.admits(job=job.name, owner=job.owner)]
        return json_answer(models.JobList(jobs=jobs))

    async def anomalies(self, request: Request) -> Response:
        """Anomalies, each with what became of its trigger."""
        wanted = filters(request, models.AnomalyFilters)
        state = self._state(request)
        decided = {decision.anomaly_id: decision for decision in state.decisions}
        anomalies = [
            models.AnomalyReport(**_told(anomaly, state.hostname), decision=decided.get(anomaly.id))
            for anomaly in state.anomalies
            if wanted.admits(job=anomaly.job, owner=anomaly.owner, kind=anomaly.kind)
            and wanted.admits(active=anomaly.end_time is None)
        ]
        return json_answer(models.AnomalyList(anomalies=anomalies))

    async def anomaly(self, request: Request) -> Response:
        """One anomaly, also of the history, with the metrics of the minutes around it."""
        filters(request, models.Filters)
        ident, state = request.path_params["id"], self._state(request)
        found = next((one for one in state.anomalies if one.id == ident), None)
        context = state.contexts.get(ident)
        if found is None or context is None:
            stored = await run_in_threadpool(self._watcher.anomaly, ident)
            owner = caller_of(request).owner
            if stored is not None and (owner is None or may_see(stored[0], owner)):
                found, context = found or stored[0], stored[1]
        if found is None:
            raise ApiError(404, "not_found", "there is no such anomaly")
        decision = next((one for one in state.decisions if one.anomaly_id == ident), None)
        told = _told(found, state.hostname)
        report = models.AnomalyInContext(**told, decision=decision, context=context)
        return json_answer(models.OneAnomaly(report))

    async def detectors(self, request: Request) -> Response:
        """How the detectors see what they judge, and why."""
        wanted = filters(request, models.DetectorFilters)
        statuses, suppressed = await run_in_threadpool(self._watcher.detector_statuses)
        caller = caller_of(request)

        def seen(one: DetectorStatus | Detected) -> bool:
            mine = caller.owner is None or one.job is None or one.owner == caller.owner
            return mine and wanted.admits(job=one.job, owner=one.owner)

        detectors = [
            models.DetectorReport(
                kind=kind,
                readings=[one for one in readings if seen(one)],
            )
            for kind, readings in statuses.items()
            if wanted.admits(kind=kind)
        ]
        admitted = [
            models.SuppressedReport(
                **_fields(one.found),
                kind=one.kind,
                cause=one.cause,
                cause_id=one.cause_id,
                since=one.since,
                again=one.again,
            )
            for one in suppressed
            if wanted.admits(kind=one.kind) and seen(one.found)
        ]
        return json_answer(models.DetectorList(detectors=detectors, suppressed=admitted))

    async def captures(self, request: Request) -> Response:
        """Captures."""
        wanted = filters(request, models.CaptureFilters)
        captures = [
            capture
            for capture in self._captures(request, wanted)
            if wanted.admits(active=capture.outcome is None)
        ]
        return json_answer(models.CaptureList(captures=captures))

    async def runs(self, request: Request) -> Response:
        """What is kept of runs, those that go on and those that ended."""
        wanted, owner = filters(request, models.RunFilters), caller_of(request).owner
        runs = [
            run
            for run in await run_in_threadpool(self._watcher.run_summaries)
            if owner in (None, run.owner)
            and wanted.admits(job=run.job, owner=run.owner, run=run.run)
            and wanted.admits(active=run.end_time is None)
        ]
        return json_answer(models.RunList(runs=runs))

    async def diagnoses(self, request: Request) -> Response:
        """What the captures' traces say."""
        diagnoses = [
            models.DiagnosisReport(
                capture=capture.id,
                job=capture.request.job,
                owner=capture.request.owner,
                time=capture.time,
                outcome=capture.diagnosis_outcome,
                diagnosis=capture.diagnosis,
            )
            for capture in self._captures(request, filters(request, models.DiagnosisFilters))
            if capture.diagnosis is not None
        ]
        return json_answer(models.DiagnosisList(diagnoses=diagnoses))

    async def capture(self, request: Request) -> Response:
        """One capture."""
        for capture in self._state(request).captures:
            if capture.id == request.path_params["id"]:
                return json_answer(models.OneCapture(capture))
        raise ApiError(404, "not_found", "there is no such capture")

    async def request_capture(self, request: Request) -> Response:
        """Ask for a capture."""
        owner = self._access.check_change(request).owner
        body = await json_body(request, bodies.CaptureBody)
        if body.is_of_a_fleet:
            self._access.check_all_jobs(request, "id, start_step and anomaly_id")
        if owner is not None and body.owner not in ("", owner):
            # Not their own job of the same name instead.
            raise ApiError(404, "refused_no_rank", f"{owner} may not capture jobs of {body.owner}")
        with refusals():
            # It waits for the capture that is being begun: off the thread that serves.
            capture = await run_in_threadpool(self._begin, body, owner)
        location = {"Location": f"/api/v1/captures/{capture.id}"}
        return json_answer(models.OneCapture(capture), 202, location)

    def _begin(self, body: bodies.CaptureBody, owner: str | None) -> Capture:
        if body.is_of_a_fleet:
            raise Refused("refused_disabled", "a fleet chooses id, start_step and anomaly itself")
        return self._watcher.request_capture(body.request(owner))

    def _state(self, request: Request) -> State:
        """What the caller may see of it."""
        return visible(self._watcher.state(), caller_of(request).owner)

    def _captures(self, request: Request, wanted: models.DiagnosisFilters) -> Iterable[Capture]:
        """Of the job and kind that are asked for."""
        return (
            capture
            for capture in self._state(request).captures
            if wanted.admits(
                job=capture.request.job, owner=capture.request.owner, kind=capture.request.kind
            )
        )


@contextmanager
def refusals() -> Iterator[None]:
    """Answered with the status of their reason."""
    try:
        yield
    except Refused as error:
        status = _REFUSED_STATUS.get(error.reason, _CONFLICT)
        raise ApiError(status, error.reason, str(error)) from error


def _told(anomaly: Anomaly, node: str) -> dict[str, Any]:
    """Of any report of an anomaly; ``node``: of who found it."""
    said = {"sentence": sentence(anomaly, node), "scope": scope_of(anomaly.kind)}
    return _fields(anomaly) | said


def _fields(found: Detected) -> dict[str, Any]:
    """Of the finding itself: what they hold stays what it is, for the models."""
    return {field.name: getattr(found, field.name) for field in fields(found)}
