"""The other workers: what they evaluate is shown here, and asked of them."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec

from warpwatch_detection.anomalies.tracked import Suppressed
from warpwatch_detection.detector import DetectorStatus
from warpwatch_fleet.agent_link import AgentError, read_answer
from warpwatch_fleet.bus.worker import BusSource
from warpwatch_runtime.bus import BusError
from warpwatch_telemetry.bus_messages import WORKERS, pack, unpack_bytes
from warpwatch_telemetry.captures import Capture, CaptureRequest, base_id
from warpwatch_telemetry.errors import Refused
from warpwatch_telemetry.jobs import RunSummary
from warpwatch_telemetry.state import State

logger = logging.getLogger(__name__)

# Requests within this time see the same.
FRESH_S = 1.0
ANSWER_S = 5.0
CAPTURE_S = 40.0
MAX_VIEW_BYTES = 256 * 2**20
# If a worker refuses with this reason, another one may have the ranks.
_ELSEWHERE = "refused_no_rank"

T = TypeVar("T")


class WorkerView(msgspec.Struct, frozen=True):
    """One worker's view of its jobs and nodes. captured: the ids of captures that it ran."""

    state: State
    captured: frozenset[str] = frozenset()
    runs: tuple[RunSummary, ...] = ()
    detectors: dict[str, tuple[DetectorStatus, ...]] = {}
    suppressed: tuple[Suppressed, ...] = ()


class Backend(Protocol):
    """The view and the captures of a worker's own part. The methods may wait."""

    def own_view(self) -> WorkerView: ...

    def own_capture(self, request: CaptureRequest) -> Capture: ...

    def own_file(
        self, capture_id: str, name: str, owner: str | None
    ) -> Path | Iterator[bytes] | None: ...


class Peers:
    """The views of other workers, as of the last ``refresh``, which is for the server's loop.

    ``capture`` and ``file`` wait, and are for other threads.
    """

    def __init__(
        self,
        source: BusSource,
        own: Backend,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.views: Sequence[WorkerView] = ()
        self._source = source
        self._own = own
        self._monotonic = monotonic
        self._refreshed_at = float("-inf")
        source.answers = self._answer

    # --- for the others ---

    async def _answer(self, operation: str, body: bytes) -> bytes:
        if operation == "view":
            return pack(msgspec.msgpack.encode(await asyncio.to_thread(self._own.own_view)))
        if operation == "capture":
            request = msgspec.json.decode(body, type=CaptureRequest)
            try:
                capture = await asyncio.to_thread(self._own.own_capture, request)
            except Refused as refused:
                error = {"reason": refused.reason, "detail": str(refused)}
                return b"409" + json.dumps({"error": error}).encode()
            return b"202" + msgspec.json.encode(capture)
        if operation == "file":
            return await asyncio.to_thread(self._file, json.loads(body))
        return b"404{}"

    def _file(self, asked: list[Any]) -> bytes:
        found = self._own.own_file(asked[0], asked[1], asked[2])
        if found is None:
            return b"404{}"
        return b"200" + (found.read_bytes() if isinstance(found, Path) else b"".join(found))

    # --- from the others ---

    async def refresh(self) -> None:
        """Ask all workers what they show; who does not answer is left out."""
        loop, now = self._source.links.loop, self._monotonic()
        if loop is None or now - self._refreshed_at < FRESH_S:
            return
        self._refreshed_at = now
        asked = asyncio.run_coroutine_threadsafe(self._ask_all("view", b"", ANSWER_S), loop)
        self.views = await asyncio.to_thread(
            lambda answers: [*filter(None, map(_view, answers))], await asyncio.wrap_future(asked)
        )

    async def _ask_all(self, operation: str, body: bytes, timeout_s: float) -> list[bytes]:
        async def ask(worker: str) -> bytes | None:
            try:
                subject = f"{WORKERS}.{worker}.{operation}"
                return await self._source.bus.ask(subject, body, timeout_s)
            except BusError as error:
                logger.warning("worker %s does not answer: %s", worker, error)
                return None

        answers = await asyncio.gather(*map(ask, self._source.shares.others()))
        return [one for one in answers if one is not None]

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        loop = self._source.links.loop
        if loop is None:
            work.close()
            raise Refused("failed", "the fleet is starting")
        return asyncio.run_coroutine_threadsafe(work, loop).result()

    def capture(self, request: CaptureRequest) -> Capture:
        """Start a capture at the worker that evaluates the job. Raises Refused."""
        try:
            return self._own.own_capture(request)
        except Refused as refused:
            if refused.reason != _ELSEWHERE:
                raise
            not_here = refused
        body = msgspec.json.encode(asdict(request))
        for answer in self._wait(self._ask_all("capture", body, CAPTURE_S)):
            try:
                found = read_answer(int(answer[:3]), answer[3:])
                return msgspec.convert(found, Capture)
            except Refused as refused:
                if refused.reason != _ELSEWHERE:
                    raise
            except AgentError as error:
                raise Refused("failed", str(error)) from error
        raise not_here

    def file(self, capture_id: str, name: str, owner: str | None) -> Path | Iterator[bytes] | None:
        found = self._own.own_file(capture_id, name, owner)
        if found is None:
            body = json.dumps([capture_id, name, owner]).encode()
            answers = self._wait(self._ask_all("file", body, CAPTURE_S))
            found = next((iter((one[3:],)) for one in answers if one.startswith(b"200")), None)
        return found

    # --- both ---

    def joined(self, own: WorkerView) -> State:
        """Return the state of all workers as one."""
        views = [own, *self.views]
        states = [view.state for view in views]

        def all_of(name: str) -> tuple[Any, ...]:
            return tuple(one for state in states for one in getattr(state, name))

        return replace(
            own.state,
            devices=all_of("devices"),
            sources=all_of("sources"),
            ranks=all_of("ranks"),
            jobs=all_of("jobs"),
            anomalies=tuple(sorted(all_of("anomalies"), key=lambda one: one.time)),
            captures=_captures(views),
            decisions=all_of("decisions"),
        )


def _captures(views: Sequence[WorkerView]) -> tuple[Capture, ...]:
    """Return all captures; who ran one knows more of it than who only hears the agents."""
    ran = frozenset[str]().union(*(view.captured for view in views))
    found = {
        one.id: one
        for view in views
        for one in view.state.captures
        if one.id in view.captured or base_id(one.id) not in ran
    }
    return tuple(sorted(found.values(), key=lambda one: one.time))


def _view(content: bytes) -> WorkerView | None:
    """Return the view, or None for one of another version that cannot be read."""
    try:
        return msgspec.msgpack.decode(unpack_bytes(content, MAX_VIEW_BYTES), type=WorkerView)
    except (ValueError, msgspec.MsgspecError) as error:
        logger.warning("what a worker shows cannot be read: %s", error)
        return None
