"""What only the agent of a node answers: its part in what a fleet does, and for its own GPUs."""

from __future__ import annotations

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from warpwatch_daemon.for_fleet import documents
from warpwatch_daemon.for_fleet.agent import Agent
from warpwatch_serving import bodies, models
from warpwatch_serving.access import Access, caller_of
from warpwatch_serving.answers import ApiError, json_answer
from warpwatch_serving.api import Api, refusals
from warpwatch_serving.request_data import json_body
from warpwatch_telemetry.captures import Capture
from warpwatch_telemetry.jobs import JobId


class AgentApi(Api):
    def __init__(self, agent: Agent, access: Access) -> None:
        super().__init__(agent, access)
        self._agent = agent

    async def lease(self, request: Request) -> Response:
        """Have a fleet judge a job for some seconds, or go on with it."""
        self._access.check_all_jobs(request, "leases")
        body = await json_body(request, documents.LeaseBody)
        with refusals():
            job = JobId(body.owner, body.job, body.run)
            self._agent.lease(job, body.holder, body.seconds, body.raised)
        return json_answer(documents.LeaseAnswer(seconds=body.seconds))

    async def prepare_capture(self, request: Request) -> Response:
        """What a capture would take now, and how far the ranks are; nothing is begun."""
        self._access.check_all_jobs(request, "captures over nodes")
        body = await json_body(request, bodies.CaptureBody)
        with refusals():
            prepared = await run_in_threadpool(self._agent.prepare_capture, body.request(None))
        return json_answer(documents.PreparedCapture(prepared))

    async def cancel_capture(self, request: Request) -> Response:
        """End what a capture has not brought yet; one that has ended stays as it is."""
        self._access.check_all_jobs(request, "captures over nodes")
        name = request.path_params["id"]
        capture = await run_in_threadpool(self._agent.cancel_capture, name)
        if capture is None:
            raise ApiError(404, "not_found", "there is no such capture")
        return json_answer(models.OneCapture(capture))

    async def resolve_anomaly(self, request: Request) -> Response:
        """End an anomaly that only service ends: the GPU is well, or has left the node."""
        self._access.check_all_jobs(request, "resolving anomalies")
        uid, ident = caller_of(request).uid, request.path_params["id"]
        who = "the holder of the token" if uid is None else f"uid {uid}"
        with refusals():
            anomaly = await run_in_threadpool(self._agent.resolve_anomaly, ident, who)
        return json_answer(documents.ResolvedAnomaly(id=ident, summary=anomaly.summary))

    def _begin(self, body: bodies.CaptureBody, owner: str | None) -> Capture:
        return self._agent.request_capture(body.request(owner), body.id or "", body.start_step)
