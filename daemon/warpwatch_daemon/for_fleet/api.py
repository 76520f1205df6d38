"""The operations that only the agent of a node has: its part in a fleet, and its own GPUs."""

from __future__ import annotations

import asyncio
import time
import zlib
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Protocol

from prometheus_client.exposition import gzip_accepted
from pydantic import BaseModel, ConfigDict, Field, model_validator
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from warpwatch_daemon.for_fleet.record_stream import RecordStream
from warpwatch_serving import bodies
from warpwatch_serving.access import Access, caller_of
from warpwatch_serving.answers import HttpError, json_answer
from warpwatch_serving.api import JsonApi, refusals
from warpwatch_serving.backend import ApiBackend
from warpwatch_serving.bodies import Filters, filters, json_body
from warpwatch_serving.routes import Operation
from warpwatch_telemetry.anomalies import Anomaly
from warpwatch_telemetry.captures import Capture, CaptureRequest, Prepared
from warpwatch_telemetry.jobs import JobId
from warpwatch_telemetry.log import encode_line
from warpwatch_telemetry.records import Clock
from warpwatch_telemetry.sections import AnomalyKind
from warpwatch_telemetry.stream import CursorLine, encode_stream_line

# A follower receives new lines this often: it has a step within this and the poll of the rings.
INTERVAL_S = 0.5
# The shards of a fleet, one that is being replaced, and a person who reads along.
MAX_FOLLOWERS = 8
MEDIA_TYPE = "application/x-ndjson"


class RecordFilters(Filters):
    """after: the cursor of the last batch; shard: ``index/of`` of those who share the jobs."""

    after: Annotated[str | None, Field(max_length=64)] = None
    follow: bool = False
    shard: Annotated[str, Field(pattern=r"^\d{1,3}/\d{1,3}$")] = "0/1"

    @model_validator(mode="after")
    def _shard_exists(self) -> RecordFilters:
        index, of = self.parts
        if index >= of:
            raise ValueError(f"shard: there is no {index} of {of}; they count from 0")
        return self

    @property
    def parts(self) -> tuple[int, int]:
        """The index and the number of shards."""
        index, _, of = self.shard.partition("/")
        return int(index), int(of)


class Agent(ApiBackend, Protocol):
    """The agent of a node: also what it sends to a fleet, and does for one."""

    def resolve_anomaly(self, anomaly_id: str, who: str) -> Anomaly:
        """Close an anomaly that only service ends; may wait. Raises Refused."""

    def records(self) -> RecordStream: ...

    def lease(self, job: JobId, holder: str, seconds: float, raised: Mapping[str, str]) -> None:
        """Let a fleet evaluate the job. Raises Refused if another one does."""

    def request_capture(
        self, request: CaptureRequest, name: str = "", start_step: int | None = None
    ) -> Capture:
        """Start a capture, with the name and the step that a fleet chose for all nodes."""

    def prepare_capture(self, request: CaptureRequest) -> Prepared:
        """Return what would be captured; nothing starts. Raises Refused."""

    def cancel_capture(self, name: str) -> Capture | None:
        """Stop a capture that runs, for a fleet; None if there is none of this name."""


class LeaseBody(BaseModel):
    """The body of ``POST /api/v1/leases``: a fleet evaluates the job, not this node."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    job: Annotated[str, Field(min_length=1, max_length=512)]
    owner: Annotated[str, Field(max_length=128)]
    run: Annotated[str, Field(max_length=512)]
    holder: Annotated[
        str, Field(min_length=1, max_length=253, description="the fleet; another one is refused")
    ]
    seconds: Annotated[float, Field(gt=0, le=60)]
    raised: Annotated[
        dict[AnomalyKind, Annotated[str, Field(min_length=1, max_length=64)]],
        Field(description="ids of what the fleet has raised of the job and is active, by kind"),
    ] = {}


@dataclass(frozen=True, slots=True)
class LeaseAnswer:
    """``seconds``: how long the lease lasts."""

    seconds: float


@dataclass(frozen=True, slots=True)
class ResolvedAnomaly:
    """``summary``: its summary after its end."""

    id: str
    summary: str


class AgentApi(JsonApi):
    """The endpoints; their docstrings are summaries in `/openapi.json`."""

    def __init__(self, agent: Agent, access: Access, wall: Callable[[], float] = time.time) -> None:
        super().__init__(agent, access)
        self._agent = agent
        self._wall = wall
        self._followers = 0

    async def records(self, request: Request) -> Response:
        """Lines of the telemetry log as they come, and anomalies and captures as they change."""
        self._access.check_all_jobs(request, "the records of all users' jobs")
        wanted = filters(request, RecordFilters)
        if wanted.follow and self._followers >= MAX_FOLLOWERS:
            detail = f"{MAX_FOLLOWERS} follow already"
            raise HttpError(503, "too_many_followers", detail, {"Retry-After": "10"})
        try:
            self._agent.records().portion(wanted.after)
        except ValueError as error:
            raise HttpError(400, "bad_request", f"query: after: {error}") from error
        content, headers = self._batches(wanted), {"vary": "Accept-Encoding"}
        if gzip_accepted(request.headers.get("accept-encoding", "")):
            content, headers["content-encoding"] = _gzipped(content), "gzip"
        return StreamingResponse(content, headers=headers, media_type=MEDIA_TYPE)

    async def _batches(self, wanted: RecordFilters) -> AsyncIterator[bytes]:
        stream, cursor = self._agent.records(), wanted.after
        state = self._agent.state()
        self._followers += wanted.follow
        try:
            while True:
                portion = stream.portion(cursor)
                cursor = portion.cursor
                end = CursorLine(cursor, state.hostname, state.version)
                # By the clock, a follower knows until when it has everything.
                clock = b"" if portion.more else encode_line(Clock(self._wall())) or b""
                yield portion.text(*wanted.parts) + clock + encode_stream_line(end)
                if stream.closed or not (wanted.follow or portion.more):
                    return
                if not portion.more:
                    await asyncio.sleep(INTERVAL_S)
        finally:
            self._followers -= wanted.follow

    async def lease(self, request: Request) -> Response:
        """Have a fleet judge a job for some seconds, or go on with it."""
        self._access.check_all_jobs(request, "leases")
        body = await json_body(request, LeaseBody)
        with refusals():
            job = JobId(body.owner, body.job, body.run)
            self._agent.lease(job, body.holder, body.seconds, body.raised)
        return json_answer(LeaseAnswer(body.seconds))

    async def prepare_capture(self, request: Request) -> Response:
        """The ranks and steps that a capture would record now; nothing starts."""
        self._access.check_all_jobs(request, "multi-node captures")
        body = await json_body(request, bodies.CaptureBody)
        with refusals():
            prepared = await run_in_threadpool(self._agent.prepare_capture, body.request(None))
        return json_answer(prepared)

    async def cancel_capture(self, request: Request) -> Response:
        """End what a capture has not brought yet; one that has ended stays as it is."""
        self._access.check_all_jobs(request, "multi-node captures")
        name = request.path_params["id"]
        capture = await run_in_threadpool(self._agent.cancel_capture, name)
        if capture is None:
            raise HttpError(404, "not_found", "there is no such capture")
        return json_answer(capture)

    async def resolve_anomaly(self, request: Request) -> Response:
        """End an anomaly that only service ends: the GPU is well, or has left the node."""
        self._access.check_all_jobs(request, "resolving anomalies")
        uid, ident = caller_of(request).uid, request.path_params["id"]
        who = "the holder of the token" if uid is None else f"uid {uid}"
        with refusals():
            anomaly = await run_in_threadpool(self._agent.resolve_anomaly, ident, who)
        return json_answer(ResolvedAnomaly(ident, anomaly.summary))

    def _begin(self, body: bodies.CaptureBody, owner: str | None) -> Capture:
        return self._agent.request_capture(body.request(owner), body.id or "", body.start_step)


async def _gzipped(parts: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield the parts compressed, each so that it can be read once it has come."""
    packer = zlib.compressobj(level=1, wbits=31)
    async for part in parts:
        yield packer.compress(part) + packer.flush(zlib.Z_SYNC_FLUSH)
    yield packer.flush()


def agent_routes(
    agent: Agent, access: Access, wall: Callable[[], float] = time.time
) -> tuple[AgentApi, list[Operation]]:
    """Return the API of an agent and the operations that only agents have."""
    api = AgentApi(agent, access, wall)
    v1, of, refused = "/api/v1", Operation, (404, 409, 503)
    return api, [
        of(f"{v1}/records", api.records, MEDIA_TYPE, RecordFilters, errors=(503,)),
        of(f"{v1}/leases", api.lease, LeaseAnswer, method="POST", body=LeaseBody,
           errors=(409,)),
        of(f"{v1}/captures/prepare", api.prepare_capture, Prepared, method="POST",
           body=bodies.CaptureBody, errors=refused),
        of(f"{v1}/captures/{{id}}/cancel", api.cancel_capture, Capture, method="POST",
           errors=(404,)),
        of(f"{v1}/anomalies/{{id}}/resolve", api.resolve_anomaly, ResolvedAnomaly, method="POST",
           errors=(404, 409)),
    ]  # fmt: skip
