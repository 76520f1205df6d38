"""The fleet as one of several workers: any of them serves the jobs of all, by their views."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from warpwatch_capturing.participant import LiveJob, find_job
from warpwatch_detection.anomalies.tracked import Suppressed
from warpwatch_detection.detector import DetectorStatus
from warpwatch_fleet.agent_link import AgentError, read_answer
from warpwatch_fleet.bus.worker import BusSource
from warpwatch_fleet.config import FleetFile
from warpwatch_fleet.fleet import Fleet
from warpwatch_fleet.source import FleetSource
from warpwatch_runtime.bus import BusError, check
from warpwatch_serving.access import METRICS, SESSION_S, Caller, Keys
from warpwatch_serving.answers import HttpError
from warpwatch_telemetry.bus_messages import WORKERS, pack, partition_of, unpack_bytes
from warpwatch_telemetry.captures import Capture, CaptureRequest, base_id
from warpwatch_telemetry.errors import Refused
from warpwatch_telemetry.jobs import RunSummary
from warpwatch_telemetry.state import RankState, State

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Requests within this time see the same.
FRESH_S = 1.0
VIEW_S = 5.0
# The details of 25,000 ranks take two seconds of a core.
DETAILS_S = 10.0
# Requests for these, and for pages, need details.
DETAILED = ("/api/v1/ranks", "/api/v1/detectors", "/api/v1/alertmanager")
CAPTURE_S = 40.0
MAX_VIEW_BYTES = 256 * 2**20
# If a worker refuses with this reason, another one may have the ranks.
_ELSEWHERE = "refused_no_rank"


class WorkerView(msgspec.Struct, frozen=True):
    """One worker's view of its jobs and nodes, without ranks."""

    state: State
    runs: Sequence[RunSummary] = ()


class WorkerDetails(msgspec.Struct, frozen=True):
    """The ranks of one worker, and how its detectors see them."""

    ranks: tuple[RankState, ...] = ()
    detectors: Mapping[str, Sequence[DetectorStatus]] = {}
    suppressed: Sequence[Suppressed] = ()


V = TypeVar("V")


class Views(Generic[V]):
    """The newest replies of the other workers to ``operation``, by worker."""

    def __init__(self, operation: str, form: type[V], timeout_s: float) -> None:
        self.operation = operation
        self.timeout_s = timeout_s
        self.refreshed_at = float("-inf")
        # Requests at once wait for the replies to the first.
        self.refreshing = asyncio.Lock()
        self.of: dict[str, V] = {}
        self._form = form

    def read(self, replies: Mapping[str, bytes]) -> None:
        """Read a reply of each live worker; if it cannot be read, the one before stays."""
        found = {}
        for worker, reply in replies.items():
            try:
                content = unpack_bytes(reply, MAX_VIEW_BYTES)
                found[worker] = msgspec.msgpack.decode(content, type=self._form)
            except (ValueError, msgspec.MsgspecError) as error:
                logger.warning("worker %s: no %s: %s", worker, self.operation, error)
                if worker in self.of:
                    found[worker] = self.of[worker]
        self.of = found


class WorkerFleet(Fleet):
    """A fleet with a part of the jobs. The other workers' views are as of ``prepare``."""

    # Another worker may have gone on with a capture that this one was killed in.
    _trigger_tries = 1

    def __init__(self, config: FleetFile) -> None:
        self._views = Views("view", WorkerView, VIEW_S)
        self._details = Views("details", WorkerDetails, DETAILS_S)
        self._worker: BusSource
        super().__init__(config)
        self.captures.are_shared = True
        self.captures.is_mine = lambda job: str(partition_of(job)) in self._worker.evaluated()

    def _source_of(self, config: FleetFile) -> FleetSource:
        check(config.bus)
        self._worker = BusSource(
            config, lambda anomalies: self.push_exporters.know(anomalies), self._reply, self._busy
        )
        return self._worker

    def _sessions(self) -> Keys:
        return SharedSessions(self._worker)

    def _busy(self) -> set[int]:
        """Return the partitions of jobs that are being captured."""
        running = (one for one in self.captures.service.captures() if one.outcome is None)
        return {partition_of(one.request.job_id) for one in running}

    # --- for the other workers ---

    async def _reply(self, operation: str, body: bytes) -> bytes:
        if operation == "view":
            return await asyncio.to_thread(self._own_view)
        if operation == "details":
            return await asyncio.to_thread(self._own_details)
        try:
            if operation == "capture":
                request = msgspec.json.decode(body, type=CaptureRequest)
                capture = await asyncio.to_thread(super().request_capture, request)
                return b"202" + msgspec.json.encode(capture)
            if operation == "file":
                return await asyncio.to_thread(self._own_file, *json.loads(body))
        except Refused as refused:
            error = {"reason": refused.reason, "detail": str(refused)}
            return b"409" + json.dumps({"error": error}).encode()
        return b"404{}"

    def _own_view(self) -> bytes:
        view = WorkerView(super().overview(), super().run_summaries())
        return pack(msgspec.msgpack.encode(view))

    def _own_details(self) -> bytes:
        details = WorkerDetails(super()._ranks(), *super().detector_statuses())
        return pack(msgspec.msgpack.encode(details))

    def _own_file(self, capture_id: str, name: str, owner: str | None) -> bytes:
        found = super().capture_file(capture_id, name, owner)
        if found is None:
            return b"404{}"
        return b"200" + (found.read_bytes() if isinstance(found, Path) else b"".join(found))

    # --- from the other workers ---

    async def prepare(self, path: str) -> None:
        """Request the views of all workers, and details only where they are shown."""
        if path != METRICS:
            await self._refresh(self._views)
            if path in DETAILED or not path.startswith("/api/"):
                await self._refresh(self._details)

    async def _refresh(self, views: Views[Any]) -> None:
        async with views.refreshing:
            if time.monotonic() - views.refreshed_at < FRESH_S:
                return
            with contextlib.suppress(BusError):
                ask = partial(self._request_all, views.operation, b"", views.timeout_s)
                replies = await asyncio.wrap_future(self._worker.links.run(ask))
                await asyncio.to_thread(views.read, replies)
            views.refreshed_at = time.monotonic()

    async def _request_all(self, operation: str, body: bytes, timeout_s: float) -> dict[str, bytes]:
        """Return the reply of each live worker, empty if there is none."""

        async def request(worker: str) -> tuple[str, bytes]:
            try:
                subject = f"{WORKERS}.{worker}.{operation}"
                return worker, await self._worker.bus.request(subject, body, timeout_s)
            except BusError as error:
                logger.warning("worker %s does not reply: %s", worker, error)
                return worker, b""

        return dict(await asyncio.gather(*map(request, self._worker.shares.others())))

    def _replies(self, operation: str, body: object) -> list[bytes]:
        """Return the replies of the other workers, in another thread than their loop's."""
        content = msgspec.json.encode(body)
        try:
            asked = self._worker.links.run(lambda: self._request_all(operation, content, CAPTURE_S))
            return list(filter(None, asked.result().values()))
        except BusError as error:
            raise Refused("failed", str(error)) from error

    # --- requests over HTTP ---

    def _ranks(self) -> tuple[RankState, ...]:
        of_others = (rank for one in self._details.of.values() for rank in one.ranks)
        return (*super()._ranks(), *of_others)

    def overview(self) -> State:
        """Return what all workers see, as one."""
        own = super().overview()
        states = [own, *(view.state for view in self._views.of.values())]

        def all_of(name: str) -> tuple[Any, ...]:
            return tuple(one for state in states for one in getattr(state, name))

        return replace(
            own,
            devices=all_of("devices"),
            sources=all_of("sources"),
            jobs=all_of("jobs"),
            decisions=all_of("decisions"),
            anomalies=tuple(sorted(all_of("anomalies"), key=lambda one: one.time)),
            captures=_captures(all_of("captures")),
        )

    def _complete_state(self) -> State | None:
        # A worker may have no agents of its own.
        return None if self.missing() else self.state()

    def run_summaries(self) -> Sequence[RunSummary]:
        found = [
            *super().run_summaries(),
            *(one for view in self._views.of.values() for one in view.runs),
        ]
        return sorted(found, key=lambda run: run.first_time)

    def detector_statuses(
        self,
    ) -> tuple[Mapping[str, Sequence[DetectorStatus]], Sequence[Suppressed]]:
        detectors, suppressed = super().detector_statuses()
        joined = {kind: list(readings) for kind, readings in detectors.items()}
        views = self._details.of.values()
        for kind, readings in (one for view in views for one in view.detectors.items()):
            joined.setdefault(kind, []).extend(readings)
        return joined, [*suppressed, *(one for view in views for one in view.suppressed)]

    def request_capture(self, request: CaptureRequest) -> Capture:
        """Start a capture at the worker that evaluates the job."""
        if not request.owner:
            # Each worker would start one for its own job of this name.
            jobs = (LiveJob(one.job_id, (0,), one.world_size) for one in self.overview().jobs)
            request = replace(request, owner=find_job(jobs, replace(request, ranks=None)).id.owner)
        try:
            return super().request_capture(request)
        except Refused as refused:
            if refused.reason != _ELSEWHERE:
                raise
            not_here = refused
        for reply in self._replies("capture", asdict(request)):
            try:
                return msgspec.convert(read_answer(int(reply[:3]), reply[3:]), Capture)
            except Refused as refused:
                if refused.reason != _ELSEWHERE:
                    raise
            except AgentError as error:
                raise Refused("failed", str(error)) from error
        raise not_here

    def capture_file(
        self, capture_id: str, name: str, owner: str | None
    ) -> Path | Iterator[bytes] | None:
        found = super().capture_file(capture_id, name, owner)
        if found is not None:
            return found
        replies = self._replies("file", [capture_id, name, owner])
        for reply in replies:
            if reply.startswith(b"200"):
                return iter((reply[3:],))
        for reply in replies:
            if reply.startswith(b"409"):
                # Raises the refusal of the worker that knows the file.
                read_answer(409, reply[3:])
        return None


class SharedSessions(Keys):
    """Sessions of browsers that all workers accept, in a bucket of the bus that ends them."""

    def __init__(self, worker: BusSource) -> None:
        super().__init__(SESSION_S, time.monotonic, site=str(worker.url))
        self._worker = worker

    async def keep(self, name: str, caller: Caller | None) -> None:
        await super().keep(name, caller)
        if caller is None:
            await self._checked(lambda: self._worker.sessions.remove(name))
        else:
            content = msgspec.json.encode(caller)
            await self._checked(lambda: self._worker.sessions.put(name, content))

    async def kept(self, name: str) -> Caller | None:
        found = await self._checked(lambda: self._worker.sessions.get(name))
        return None if found is None else msgspec.json.decode(found[0], type=Caller)

    async def _checked(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Do the work in the loop of the bus. Raises HttpError if the bus is away."""
        try:
            return await asyncio.wrap_future(self._worker.links.run(work))
        except BusError as error:
            detail = f"no session can be checked: {error}; use the token or the socket"
            raise HttpError(503, "bus_away", detail) from error


def _captures(shown: Sequence[Capture]) -> tuple[Capture, ...]:
    """Return all captures. A worker that ran one knows more of it than its agents report."""
    ran = {one.id for one in shown if not one.of_fleet}
    found = {one.id: one for one in shown if not one.of_fleet or base_id(one.id) not in ran}
    return tuple(sorted(found.values(), key=lambda one: one.time))
