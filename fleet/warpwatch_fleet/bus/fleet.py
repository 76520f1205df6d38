"""The fleet as one of several workers: any of them answers for all, by what the others answer."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import msgspec

from warpwatch_detection.anomalies.tracked import Suppressed
from warpwatch_detection.detector import DetectorStatus
from warpwatch_fleet.agent_link import AgentError, read_answer
from warpwatch_fleet.bus.worker import BusSource
from warpwatch_fleet.config import FleetFile
from warpwatch_fleet.fleet import Fleet
from warpwatch_fleet.source import FleetSource
from warpwatch_runtime.bus import BusError, check
from warpwatch_telemetry.bus_messages import WORKERS, pack, partition_of, unpack_bytes
from warpwatch_telemetry.captures import Capture, CaptureRequest, base_id
from warpwatch_telemetry.errors import Refused
from warpwatch_telemetry.jobs import RunSummary
from warpwatch_telemetry.state import State

logger = logging.getLogger(__name__)

# Requests within this time see the same.
FRESH_S = 1.0
VIEW_S = 5.0
CAPTURE_S = 40.0
MAX_VIEW_BYTES = 256 * 2**20
# If a worker refuses with this reason, another one may have the ranks.
_ELSEWHERE = "refused_no_rank"


class WorkerView(msgspec.Struct, frozen=True):
    """One worker's view of its jobs and nodes. captured: the ids of captures that it ran."""

    state: State
    captured: frozenset[str] = frozenset()
    runs: tuple[RunSummary, ...] = ()
    detectors: dict[str, tuple[DetectorStatus, ...]] = {}
    suppressed: tuple[Suppressed, ...] = ()


class WorkerFleet(Fleet):
    """A fleet with a part of the jobs. The other workers' views are as of ``prepare``."""

    def __init__(self, config: FleetFile) -> None:
        self._views: dict[str, WorkerView] = {}
        self._refreshed_at = float("-inf")
        self._worker: BusSource
        super().__init__(config)
        self.captures.are_shared = True
        self.captures.is_mine = lambda job: str(partition_of(job)) in self._worker.judged()

    def _source_of(self, config: FleetFile) -> FleetSource:
        check(config.bus)
        self._worker = BusSource(
            config, lambda anomalies: self.push_exporters.know(anomalies), self._answer, self._busy
        )
        return self._worker

    def _busy(self) -> set[int]:
        """Return the partitions of jobs that are being captured."""
        running = (one for one in self.captures.service.captures() if one.outcome is None)
        return {partition_of(one.request.job_id) for one in running}

    # --- for the other workers ---

    async def _answer(self, operation: str, body: bytes) -> bytes:
        if operation == "view":
            return await asyncio.to_thread(self._own_view)
        if operation == "capture":
            request = msgspec.json.decode(body, type=CaptureRequest)
            try:
                capture = await asyncio.to_thread(super().request_capture, request)
            except Refused as refused:
                error = {"reason": refused.reason, "detail": str(refused)}
                return b"409" + json.dumps({"error": error}).encode()
            return b"202" + msgspec.json.encode(capture)
        if operation == "file":
            return await asyncio.to_thread(self._own_file, *json.loads(body))
        return b"404{}"

    def _own_view(self) -> bytes:
        detectors, suppressed = super().detector_statuses()
        view = WorkerView(
            super().state(),
            self._captured(),
            tuple(super().run_summaries()),
            {kind: tuple(readings) for kind, readings in detectors.items()},
            tuple(suppressed),
        )
        return pack(msgspec.msgpack.encode(view))

    def _captured(self) -> frozenset[str]:
        return frozenset(one.id for one in self.captures.service.captures())

    def _own_file(self, capture_id: str, name: str, owner: str | None) -> bytes:
        found = super().capture_file(capture_id, name, owner)
        if found is None:
            return b"404{}"
        return b"200" + (found.read_bytes() if isinstance(found, Path) else b"".join(found))

    # --- from the other workers ---

    async def prepare(self) -> None:
        """Ask all workers for their views. The last view of one that does not answer stays."""
        loop, now = self._worker.links.loop, time.monotonic()
        if loop is None or now - self._refreshed_at < FRESH_S:
            return
        self._refreshed_at = now
        asked = asyncio.run_coroutine_threadsafe(self._ask_all("view", b"", VIEW_S), loop)
        replies = await asyncio.wrap_future(asked)
        self._views = await asyncio.to_thread(_decode_views, replies, self._views)

    async def _ask_all(self, operation: str, body: bytes, timeout_s: float) -> dict[str, bytes]:
        """Return the reply of each live worker; of one that does not answer it is empty."""

        async def ask(worker: str) -> tuple[str, bytes]:
            try:
                subject = f"{WORKERS}.{worker}.{operation}"
                return worker, await self._worker.bus.ask(subject, body, timeout_s)
            except BusError as error:
                logger.warning("worker %s does not answer: %s", worker, error)
                return worker, b""

        return dict(await asyncio.gather(*map(ask, self._worker.shares.others())))

    def _replies(self, operation: str, body: object) -> list[bytes]:
        """Return the replies of the other workers, in another thread than their loop's."""
        loop = self._worker.links.loop
        if loop is None:
            raise Refused("failed", "the fleet is starting")
        work = self._ask_all(operation, msgspec.json.encode(body), CAPTURE_S)
        return list(filter(None, asyncio.run_coroutine_threadsafe(work, loop).result().values()))

    # --- what HTTP asks ---

    def state(self) -> State:
        """Return the states of all workers as one."""
        own = WorkerView(super().state(), self._captured())
        views = [own, *self._views.values()]

        def all_of(name: str) -> tuple[Any, ...]:
            return tuple(one for view in views for one in getattr(view.state, name))

        return replace(
            own.state,
            devices=all_of("devices"),
            sources=all_of("sources"),
            ranks=all_of("ranks"),
            jobs=all_of("jobs"),
            decisions=all_of("decisions"),
            anomalies=tuple(sorted(all_of("anomalies"), key=lambda one: one.time)),
            captures=_captures(views),
        )

    def run_summaries(self) -> Sequence[RunSummary]:
        found = [
            *super().run_summaries(),
            *(one for view in self._views.values() for one in view.runs),
        ]
        return sorted(found, key=lambda run: run.first_time)

    def detector_statuses(
        self,
    ) -> tuple[Mapping[str, Sequence[DetectorStatus]], Sequence[Suppressed]]:
        detectors, suppressed = super().detector_statuses()
        joined = {kind: list(readings) for kind, readings in detectors.items()}
        for view in self._views.values():
            for kind, readings in view.detectors.items():
                joined.setdefault(kind, []).extend(readings)
            suppressed = [*suppressed, *view.suppressed]
        return joined, suppressed

    def request_capture(self, request: CaptureRequest) -> Capture:
        """Start a capture at the worker that evaluates the job."""
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
        if found is None:
            replies = self._replies("file", [capture_id, name, owner])
            found = next((iter((one[3:],)) for one in replies if one.startswith(b"200")), None)
        return found


def _captures(views: Sequence[WorkerView]) -> tuple[Capture, ...]:
    """Return all captures. A worker that ran one knows more of it than those with its agents."""
    ran = frozenset[str]().union(*(view.captured for view in views))
    found = {
        one.id: one
        for view in views
        for one in view.state.captures
        if one.id in view.captured or base_id(one.id) not in ran
    }
    return tuple(sorted(found.values(), key=lambda one: one.time))


def _decode_views(
    replies: Mapping[str, bytes], before: Mapping[str, WorkerView]
) -> dict[str, WorkerView]:
    """Return the view of each worker; if its reply cannot be read, the one ``before``."""
    views = {}
    for worker, reply in replies.items():
        try:
            content = unpack_bytes(reply, MAX_VIEW_BYTES)
            views[worker] = msgspec.msgpack.decode(content, type=WorkerView)
        except (ValueError, msgspec.MsgspecError) as error:
            logger.warning("the view of worker %s cannot be read: %s", worker, error)
            if worker in before:
                views[worker] = before[worker]
    return views
