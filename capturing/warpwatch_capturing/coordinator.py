"""One path for all captures: request → policy → ranks → finisher."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial

from warpwatch_capturing import budget
from warpwatch_capturing.board import Board
from warpwatch_capturing.children.confinement import Run, run
from warpwatch_capturing.cost import CostWatch
from warpwatch_capturing.finisher import Finisher
from warpwatch_capturing.policy import Policy, Refusals
from warpwatch_capturing.register import CaptureRegister
from warpwatch_capturing.session import (
    CaptureBackend,
    CaptureSession,
    cancel_safely,
    check_start,
    choose,
    has_ended,
    shown,
)
from warpwatch_capturing.store import Store
from warpwatch_telemetry import capture_id as ids
from warpwatch_telemetry.captures import STEP_KINDS, Capture, CaptureRequest, Prepared
from warpwatch_telemetry.errors import Refused
from warpwatch_telemetry.jobs import JobId
from warpwatch_telemetry.records import End, RankEvent, Record, Step

logger = logging.getLogger(__name__)

# The job has paid for what it brought.
_RECORDED = frozenset({"recording", "exported", "written"})


class Coordinator:
    """``observe`` and ``advance`` are the pipeline's; ``request`` may be called from any thread.

    None of them touches a disk: what does is the finisher's. ``hurry`` gets whether a capture
    runs, so that the pipeline looks more often. ``run``: starts what reads traces.
    """

    def __init__(
        self,
        policy: Policy,
        store: Store,
        backend: CaptureBackend,
        board: Board,
        hurry: Callable[[bool], None],
        wake_finisher: Callable[[], None],
        monotonic: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        run: Run = run,
    ) -> None:
        self.policy = policy
        self._store = store
        self._backend = backend
        self._board = board
        self._hurry = hurry
        self._monotonic, self._wall = monotonic, wall
        self._lock = threading.RLock()
        self._sessions: dict[str, CaptureSession] = {}
        # When each of them was begun.
        self._begun_at: dict[str, float] = {}
        self._costs = CostWatch()
        self._refusals = Refusals()
        self.register = CaptureRegister(store, board)
        self._finisher = Finisher(self.register, board, wake_finisher, wall, run)
        self.finish = self._finisher.finish
        self.finish_urgent = self._finisher.finish_urgent
        self._count_taken()

    def _count_taken(self) -> None:
        """What was taken before a restart counts on."""
        now, at = self._wall(), self._monotonic()
        for capture in self.register.all():
            self.policy.begun(capture.request, at - max(0.0, now - capture.time))

    # --- any thread ---

    def request(
        self, request: CaptureRequest, name: str = "", start_step: int | None = None
    ) -> Capture:
        """Begin a capture. Raises Refused; every answer is counted, the same again but once.

        ``name``, ``start_step``: as it is called and begins on all nodes; left out: as is right
        for this one.
        """
        at = self._monotonic()
        with self._lock:
            try:
                if self.register.get(name) is not None:
                    raise Refused("refused_busy", f"there is a capture {name} already")
                request, numbers, world_size = choose(self._backend, request)
                self.policy.check(request, self._busy(request), at)
                if start_step is not None:
                    check_start(self._backend, request, numbers, start_step)
                now = self._wall()
                capture = Capture(
                    name or ids.new(now),
                    request,
                    now,
                    world_size=world_size,
                    start_step=start_step,
                    of_fleet=bool(name),
                )
                session = self._begin(capture, numbers, at)
            except Refused as error:
                self._count_refusal(request, error.reason, error, at)
                raise
            capture = self._begun(session, at)
        self._hurry(True)
        logger.info(
            "capture %s: %s of %s, %d ranks, %s steps from %s, expected to cost %s s (%s)",
            capture.id,
            request.kind,
            request.job,
            len(numbers),
            capture.steps,
            capture.start_step,
            "?" if capture.expected_cost_s is None else f"{capture.expected_cost_s:.1f}",
            request.reason or request.trigger,
        )
        return capture

    def prepare(self, request: CaptureRequest) -> Prepared:
        """What would be captured now, of which nothing is reserved. Raises Refused, counted."""
        at = self._monotonic()
        with self._lock:
            try:
                request, numbers, _ = choose(self._backend, request)
                self.policy.check(request, self._busy(request), at)
                if request.kind not in STEP_KINDS:
                    return Prepared(tuple(numbers))
                pace = self._backend.pace(request.job_id, numbers)
                return Prepared(tuple(numbers), self._plan(request, pace.step_s).steps, *pace)
            except Refused as error:
                self._count_refusal(request, error.reason, error, at)
                raise

    def cancel(self, name: str, detail: str) -> Capture | None:
        """End what has brought nothing yet: the capture as it is then; None: there is none."""
        with self._lock:
            session = self._sessions.get(name)
            if session is not None:
                begun_at = self._begun_at[name]
                if not any(rank.state in _RECORDED for rank in session.ranks.values()):
                    self.policy.withdrawn(session.capture.request, begun_at)
                cancel_safely(session, detail)
                self._end(session, self._monotonic())
        return self.register.get(name)

    def is_busy(self, job: JobId) -> bool:
        with self._lock:
            return any(s.capture.request.job_id == job for s in self._sessions.values())

    def is_settled(self, capture_id: str) -> bool:
        """Whether nothing more will be written of a capture that has ended."""
        with self._lock:
            return not (self._costs.awaits(capture_id) or self._finisher.is_pricing(capture_id))

    def _busy(self, request: CaptureRequest) -> Collection[int]:
        """Ranks of the job in captures that this request does not supersede."""
        return {
            number
            for session in self._sessions.values()
            if _is_of_job(session, request) and not _supersedes(request, session)
            for number in session.ranks
        }

    def _begin(self, capture: Capture, numbers: list[int], at: float) -> CaptureSession:
        """Ask the ranks. Raises Refused."""
        request = capture.request
        folder = str(self._store.folder(capture.id, capture.time))
        capture = replace(capture, folder=folder)
        if request.kind in STEP_KINDS:
            step_s = self._backend.pace(request.job_id, numbers).step_s
            request, steps, cost_s = self._plan(request, step_s)
            capture = replace(capture, request=request, steps=steps, expected_cost_s=cost_s)
        try:
            self._end_superseded(request, numbers)
            return self._backend.begin(capture, numbers, at)
        except Refused:
            raise
        except Exception as error:
            logger.exception("capture %s could not be begun", capture.id)
            raise Refused("failed", f"{type(error).__name__}: {error}") from error

    def _begun(self, session: CaptureSession, at: float) -> Capture:
        """The capture as it is shown, now that its ranks have been asked."""
        request = session.capture.request
        self.policy.begun(request, at)
        self._sessions[session.capture.id] = session
        self._begun_at[session.capture.id] = at
        self._costs.begin(session, min(session.ranks))
        capture = shown(session)
        self.register.keep(capture)
        self._finisher.create(capture, partial(self._refuse_for_disk, capture, at))
        return capture

    def _refuse_for_disk(self, capture: Capture, at: float, error: OSError) -> None:
        """The store had no room after all for what was begun ``at``; in the finisher's thread."""
        request, detail = capture.request, f"{self._store.path}: {error.strerror}"
        with self._lock:
            session = self._sessions.pop(capture.id, None)
            self._begun_at.pop(capture.id, None)
            if session is not None:
                cancel_safely(session, detail)
                capture = shown(session)
            self._costs.forget(capture.id)
            self.policy.withdrawn(request, at)
            self.register.refuse(
                replace(capture, outcome="refused_disk", detail=detail, end_time=self._wall())
            )
            self._count_refusal(request, "refused_disk", detail, self._monotonic())

    def _count_refusal(
        self, request: CaptureRequest, reason: str, detail: object, at: float
    ) -> None:
        if self._refusals.is_new(request, reason, at):
            count = self._board.metrics.count_capture
            count(request.kind, request.trigger, reason, request.owner)
            logger.info("no %s capture of %s: %s", request.kind, request.job, detail)

    def _plan(self, request: CaptureRequest, step_s: float) -> budget.Plan:
        """Return what is captured of what was asked for."""
        known = self.register.known_events(request)
        events = self._backend.events_per_step(request.job_id) if known is None else None
        if events:
            known = budget.Known(events)
        return budget.plan(request, known, step_s)

    def _end_superseded(self, request: CaptureRequest, numbers: Collection[int]) -> None:
        """Stacks of a hang do not wait for steps that do not come."""
        of_what = f" of a {request.anomaly_kind}" if request.anomaly_kind else ""
        for session in list(self._sessions.values()):
            if _supersedes(request, session) and not session.ranks.keys().isdisjoint(numbers):
                session.cancel(f"superseded by stacks{of_what}")
                self._end(session, self._monotonic())

    # --- the pipeline ---

    def observe(self, record: Record) -> None:
        if not isinstance(record, RankEvent | Step | End):
            return
        with self._lock:
            if isinstance(record, Step):
                self._costs.observe(record)
                return
            if isinstance(record, End) or record.event == "died":
                self._costs.forget_rank(record.job_id, record.rank)
            at = self._monotonic()
            for session in self._sessions.values():
                session.observe(record, at)

    def advance(self, at: float) -> None:
        with self._lock:
            for session in list(self._sessions.values()):
                if has_ended(session, at):
                    self._end(session, at)
                else:
                    self.register.keep(shown(session))
            for capture, cost in self._costs.take_priced(at):
                self._finisher.put_cost(capture, cost)
            busy = bool(self._sessions)
        self._hurry(busy)

    def _end(self, session: CaptureSession, at: float) -> None:
        """Nothing more is expected of the ranks; what they left is the finisher's."""
        capture = shown(session)
        self.register.keep(capture)
        del self._sessions[capture.id], self._begun_at[capture.id]
        self._costs.end(capture.id, at)
        self._refusals.forget(capture.request)
        self._finisher.put(session)

    def close(self) -> None:
        """The daemon ends: no rank is to record in vain."""
        with self._lock:
            for session in self._sessions.values():
                cancel_safely(session, "the daemon ended")

    def retain(self) -> None:
        """Retention of the store; a loop of its own."""
        self.register.retain(self._wall())
        self.register.publish_residuals()


def _supersedes(request: CaptureRequest, session: CaptureSession) -> bool:
    """Whether the session gives way: stacks do not wait for steps that may not come."""
    running = session.capture.request
    gives_way = request.kind == "stacks" and running.kind != "stacks"
    return gives_way and _is_of_job(session, request)


def _is_of_job(session: CaptureSession, request: CaptureRequest) -> bool:
    return session.capture.request.job_id == request.job_id
