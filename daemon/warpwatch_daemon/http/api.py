"""The JSON API: what is known, and asking for a capture."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from warpwatch_daemon.config.mistakes import mistakes
from warpwatch_daemon.http import documents
from warpwatch_daemon.http.access import Access
from warpwatch_daemon.http.answers import ApiError, json_answer
from warpwatch_daemon.http.backend import Backend
from warpwatch_daemon.http.bodies import json_body
from warpwatch_telemetry.captures import Capture, CaptureKind, CaptureRequest
from warpwatch_telemetry.errors import Refused

# The status of a refusal by its reason; what is not here is a conflict with what goes on.
_REFUSED_STATUS = {"refused_no_rank": 404, "refused_disk": 503, "no_memory": 503}
_CONFLICT = 409


Rank = Annotated[int, Field(ge=0, lt=2**31)]


class CaptureBody(BaseModel):
    """The body of ``POST /api/v1/captures``."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    job: Annotated[str, Field(min_length=1, max_length=512)]
    kind: CaptureKind = "torch"
    ranks: Annotated[list[Rank], Field(min_length=1, max_length=1024)] | None = None
    steps: Annotated[int, Field(ge=1, le=100)] = 5
    options: tuple[Literal["stacks", "shapes", "memory"], ...] = ()
    backend: Literal["shim", "kineto"] | None = None
    reason: Annotated[str, Field(max_length=500)] = ""


class Api:
    """One method a route. Answers are documents of the newest state."""

    def __init__(self, backend: Backend, access: Access) -> None:
        self._backend = backend
        self._access = access

    async def healthz(self, request: Request) -> Response:
        return json_answer({"status": "ok", "version": self._backend.state().version})

    async def readyz(self, request: Request) -> Response:
        missing = self._backend.missing()
        document = {
            "ready": not missing,
            "missing": list(missing),
            "sources": documents.plain(self._backend.state().sources),
        }
        return json_answer(document, 503 if missing else 200)

    async def devices(self, request: Request) -> Response:
        _filters(request)
        samples = self._backend.state().devices
        return json_answer({"devices": [documents.device(sample) for sample in samples]})

    async def ranks(self, request: Request) -> Response:
        job = _filters(request, "job").get("job")
        ranks = [rank for rank in self._backend.state().ranks if job in (None, rank.job)]
        return json_answer({"ranks": documents.plain(ranks)})

    async def jobs(self, request: Request) -> Response:
        name = _filters(request, "job").get("job")
        state = self._backend.state()
        jobs = [job for job in state.jobs + state.kineto_jobs if name in (None, job.name)]
        return json_answer({"jobs": documents.plain(jobs)})

    async def anomalies(self, request: Request) -> Response:
        filters = _filters(request, "job", "kind", "active")
        active = _boolean("active", filters.get("active"))
        state = self._backend.state()
        found = [
            anomaly
            for anomaly in state.anomalies
            if filters.get("job") in (None, anomaly.job)
            and filters.get("kind") in (None, anomaly.kind)
            and active in (None, anomaly.end_time is None)
        ]
        return json_answer({"anomalies": documents.anomalies(found, state.decisions)})

    async def anomaly(self, request: Request) -> Response:
        """With the metrics of the minutes around it, and what became of its trigger."""
        _filters(request)
        ident, state = request.path_params["id"], self._backend.state()
        found = next((one for one in state.anomalies if one.id == ident), None)
        context = state.contexts.get(ident)
        if found is None or context is None:
            stored = await run_in_threadpool(self._backend.anomaly, ident)
            if stored is not None:
                found, context = found or stored[0], stored[1]
        if found is None:
            raise ApiError(404, "not_found", "there is no such anomaly")
        (document,) = documents.anomalies([found], state.decisions)
        return json_answer(document | {"context": documents.plain(context)})

    async def detectors(self, request: Request) -> Response:
        filters = _filters(request, "job", "kind")
        statuses, suppressed = await run_in_threadpool(self._backend.detector_statuses)
        return json_answer(
            documents.detectors(statuses, suppressed, filters.get("job"), filters.get("kind"))
        )

    async def captures(self, request: Request) -> Response:
        filters = _filters(request, "job", "kind", "active")
        active = _boolean("active", filters.get("active"))
        captures = [
            capture for capture in self._of(filters) if active in (None, capture.outcome is None)
        ]
        return json_answer({"captures": documents.plain(captures)})

    async def diagnoses(self, request: Request) -> Response:
        diagnosed = [
            capture
            for capture in self._of(_filters(request, "job", "kind"))
            if capture.diagnosis is not None
        ]
        return json_answer({"diagnoses": [documents.diagnosis(item) for item in diagnosed]})

    async def capture(self, request: Request) -> Response:
        for capture in self._backend.state().captures:
            if capture.id == request.path_params["id"]:
                return json_answer(documents.plain(capture))
        raise ApiError(404, "not_found", "there is no such capture")

    async def request_capture(self, request: Request) -> Response:
        self._access.check_change(request)
        body = await _capture_body(request)
        asked = CaptureRequest(
            job=body.job,
            kind=body.kind,
            trigger="manual",
            ranks=None if body.ranks is None else tuple(sorted(set(body.ranks))),
            steps=body.steps,
            options=tuple(sorted(set(body.options))),
            backend=body.backend,
            reason=body.reason,
        )
        try:
            # It waits for the capture that is being begun: off the thread that serves.
            capture = await run_in_threadpool(self._backend.request_capture, asked)
        except Refused as error:
            status = _REFUSED_STATUS.get(error.reason, _CONFLICT)
            raise ApiError(status, error.reason, str(error)) from error
        location = {"Location": f"/api/v1/captures/{capture.id}"}
        return json_answer(documents.plain(capture), 202, location)

    def _of(self, filters: dict[str, str]) -> Iterable[Capture]:
        """Captures of the job and kind that are asked for."""
        return (
            capture
            for capture in self._backend.state().captures
            if filters.get("job") in (None, capture.request.job)
            and filters.get("kind") in (None, capture.request.kind)
        )


def _filters(request: Request, *known: str) -> dict[str, str]:
    """The query's parameters. Raises ApiError for one that means nothing here."""
    for name in request.query_params:
        if name not in known:
            names = f"; known: {', '.join(known)}" if known else ""
            raise ApiError(400, "bad_request", f"unknown parameter {name[:50]!r}{names}")
    return dict(request.query_params)


def _boolean(name: str, text: str | None) -> bool | None:
    if text not in (None, "true", "false"):
        raise ApiError(400, "bad_request", f"{name} is true or false")
    return None if text is None else text == "true"


async def _capture_body(request: Request) -> CaptureBody:
    content = await json_body(request)
    try:
        body = CaptureBody.model_validate_json(content)
    except ValidationError as error:
        raise ApiError(400, "bad_request", _explain(error)) from error
    if body.options and body.kind != "torch":
        raise ApiError(400, "bad_request", f"options: kind torch has them, {body.kind} has none")
    return body


def _explain(error: ValidationError) -> str:
    first = mistakes(error, CaptureBody)[0]
    if first.kind == "json_invalid":
        return "the body is no JSON"
    return f"{first.path[:50]}: {first.text}" if first.path else first.text
