"""The one path of all captures: request, policy, participants, finisher."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

from warpwatch_capturing.config import TriggersConfig
from warpwatch_capturing.confinement import Run, run
from warpwatch_capturing.cost import CostWatch
from warpwatch_capturing.finisher import Finisher
from warpwatch_capturing.participant import Board, LiveJob, Participant, find_job
from warpwatch_capturing.policy import Known, NoLimits, Plan, Refusals, plan
from warpwatch_capturing.register import CaptureRegister
from warpwatch_capturing.session import CaptureSession
from warpwatch_capturing.triggers import is_refused
from warpwatch_runtime.quantities import plural
from warpwatch_telemetry.captures import (
    STEP_KINDS,
    Capture,
    CaptureRequest,
    Prepared,
    new_capture_id,
)
from warpwatch_telemetry.errors import Refused
from warpwatch_telemetry.jobs import JobId
from warpwatch_telemetry.records import End, RankEvent, Record, Step

logger = logging.getLogger(__name__)

# A rank in one of these states has cost the job something.
_RECORDED = frozenset({"recording", "exported", "written"})


class Participants(Protocol):
    """All places that can take part. is_local: whether traces are stored on this machine."""

    is_local: bool

    def jobs(self) -> Iterable[LiveJob]:
        """Return the jobs that run."""

    def choose(self, job: LiveJob, request: CaptureRequest) -> Collection[int]:
        """Return the ranks to capture if the request names none."""

    def of(
        self, job: LiveJob, numbers: Collection[int], request: CaptureRequest
    ) -> Sequence[Participant]:
        """Return the participants of these ranks. Raises Refused."""


class CaptureService:
    """All captures. ``request``, ``prepare``, ``cancel`` may be called from any thread.

    ``observe`` and ``advance`` belong to one loop. None of them waits for a disk: the finisher
    does. ``hurry`` receives whether a capture runs, so that ``advance`` is called more often.
    ``run``: starts the process that reads traces.
    """

    def __init__(
        self,
        policy: NoLimits,
        register: CaptureRegister,
        participants: Participants,
        board: Board,
        hurry: Callable[[bool], None],
        wake_finisher: Callable[[], None],
        monotonic: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        run: Run = run,
    ) -> None:
        self.policy = policy
        self.register = register
        self._participants = participants
        self._board = board
        self._hurry = hurry
        self._monotonic, self._wall = monotonic, wall
        self._lock = threading.RLock()
        self._sessions: dict[str, CaptureSession] = {}
        self._costs = CostWatch()
        self._refusals = Refusals()
        self._finisher = Finisher(register, board, wake_finisher, wall, run)
        self.finish = self._finisher.finish
        self.finish_urgent = self._finisher.finish_urgent
        # Captures of before a restart count, too.
        now, at = wall(), monotonic()
        for capture in register.all():
            if not is_refused(capture):
                policy.add_start(capture.request, at - max(0.0, now - capture.time))

    # --- any thread ---

    @property
    def config(self) -> TriggersConfig:
        return self.policy.config

    def captures(self) -> Sequence[Capture]:
        return self.register.all()

    def capture(self, capture_id: str) -> Capture | None:
        return self.register.get(capture_id)

    def request(
        self, request: CaptureRequest, name: str = "", start_step: int | None = None
    ) -> Capture:
        """Start a capture. Raises Refused; refusals are counted, a repeated one only once.

        A multi-node capture passes ``name`` and ``start_step``; else they are chosen here.
        """
        at = self._monotonic()
        with self._lock:
            try:
                if self.register.get(name) is not None:
                    raise Refused("refused_busy", f"there is a capture {name} already")
                job, numbers, request = self._choose(request)
                session = self._start(job, numbers, request, name, start_step, at)
            except Refused as error:
                self._count_refusal(request, error.reason, error, at)
                raise
            capture = self._started(session, at)
        self._hurry(True)
        about = ", ".join(_about(capture))
        logger.info("capture %s: %s (%s)", capture.id, about, request.reason or request.trigger)
        return capture

    def prepare(self, request: CaptureRequest) -> Prepared:
        """Return what would be captured now; nothing is reserved. Raises Refused, counted."""
        at = self._monotonic()
        with self._lock:
            try:
                job, numbers, request = self._choose(request)
                self.policy.check(request, self._busy(request), at)
                if request.kind not in STEP_KINDS:
                    return Prepared(tuple(numbers))
                (local,) = self._participants.of(job, numbers, request)
                local.prepare(request, at)
                assert isinstance(local.answer, Prepared)
                step_s = local.answer.step_s or 0.0
                return replace(local.answer, steps=self._plan(job, request, step_s).steps)
            except Refused as error:
                self._count_refusal(request, error.reason, error, at)
                raise

    def cancel(self, name: str, detail: str) -> Capture | None:
        """Stop a capture. Return it as it is then, or None if there is none of this name."""
        with self._lock:
            session = self._sessions.get(name)
            if session is not None:
                if not any(rank.state in _RECORDED for rank in session.ranks.values()):
                    self.policy.remove_start(session.capture.request, session.begun_at)
                session.cancel(detail)
                self._end(session, self._monotonic())
        return self.register.get(name)

    def is_busy(self, job: JobId) -> bool:
        with self._lock:
            return any(s.capture.request.job_id == job for s in self._sessions.values())

    def is_settled(self, capture_id: str) -> bool:
        """Return whether nothing more will be written of a capture that has ended."""
        with self._lock:
            return not (self._costs.awaits(capture_id) or self._finisher.is_pricing(capture_id))

    # --- starting ---

    def _choose(self, request: CaptureRequest) -> tuple[LiveJob, list[int], CaptureRequest]:
        """Return the job, its ranks, and the request with the job's full id. Raises Refused."""
        job = find_job(self._participants.jobs(), request)
        numbers = sorted(set(request.ranks or self._participants.choose(job, request)))
        return job, numbers, replace(request, **job.id.fields())

    def _busy(self, request: CaptureRequest) -> Collection[int]:
        """Return the job's ranks in captures that this request does not supersede."""
        return {
            number
            for session in self._sessions.values()
            if _is_of_job(session, request) and not _supersedes(request, session)
            for number in session.ranks
        }

    def _start(
        self,
        job: LiveJob,
        numbers: list[int],
        request: CaptureRequest,
        name: str,
        start_step: int | None,
        at: float,
    ) -> CaptureSession:
        """Send requests to the participants. Raises Refused."""
        self.policy.check(request, self._busy(request), at)
        now = self._wall()
        capture = Capture(
            name or new_capture_id(now),
            request,
            now,
            world_size=job.world_size,
            start_step=start_step,
            of_fleet=bool(name) and self._participants.is_local,
        )
        if self._participants.is_local:
            capture = self.register.with_folder(capture)
        try:
            participants = self._participants.of(job, numbers, request)
            session = CaptureSession(capture, participants, partial(self._plan, job), at)
            self._end_superseded(request, numbers)
            session.begin(at)
        except Refused:
            raise
        except Exception as error:
            logger.exception("capture %s could not be started", capture.id)
            raise Refused("failed", f"{type(error).__name__}: {error}") from error
        return session

    def _started(self, session: CaptureSession, at: float) -> Capture:
        capture = session.shown()
        self.policy.add_start(capture.request, at)
        self._sessions[capture.id] = session
        self.register.keep(capture)
        if self._participants.is_local:
            self._costs.begin(session, min(session.ranks))
            self._finisher.create(capture, partial(self._refuse_for_disk, session))
        return capture

    def _refuse_for_disk(self, session: CaptureSession, error: OSError) -> None:
        """Refuse a started capture, in the finisher's thread: its folder cannot be made."""
        detail = f"{self.register.store.path}: {error.strerror}"
        with self._lock:
            if self._sessions.pop(session.capture.id, None) is not None:
                session.cancel(detail)
            self._refuse(session, Refused("refused_disk", detail))

    def _refuse(self, session: CaptureSession, refused: Refused) -> None:
        """Refuse a started capture, which has recorded nothing."""
        capture, now = session.shown(), self._wall()
        self._costs.forget(capture.id)
        self.policy.remove_start(capture.request, session.begun_at)
        self.register.refuse(
            replace(capture, outcome=refused.reason, detail=str(refused), end_time=now)
        )
        request, at = session.capture.request, self._monotonic()
        self._count_refusal(request, refused.reason, refused, at)

    def _count_refusal(
        self, request: CaptureRequest, reason: str, detail: object, at: float
    ) -> None:
        if self._refusals.is_new(request, reason, at):
            count = self._board.metrics.count_capture
            count(request.kind, request.trigger, reason, request.owner)
            logger.info("no %s capture of %s: %s", request.kind, request.job, detail)

    def _plan(self, job: LiveJob, request: CaptureRequest, step_s: float) -> Plan:
        """Return what is recorded of a request. Agents plan for themselves."""
        if not self._participants.is_local:
            return Plan(request, request.steps)
        known = self.register.known_events(request)
        if known is None and job.events_per_step:
            known = Known(job.events_per_step)
        return plan(request, known, step_s)

    def _end_superseded(self, request: CaptureRequest, numbers: Collection[int]) -> None:
        """End captures that wait for steps, for a hang's stacks."""
        of_what = f" of a {request.anomaly_kind}" if request.anomaly_kind else ""
        for session in list(self._sessions.values()):
            if _supersedes(request, session) and not session.ranks.keys().isdisjoint(numbers):
                session.cancel(f"superseded by stacks{of_what}")
                self._end(session, self._monotonic())

    # --- one loop ---

    def observe(self, record: Record) -> None:
        """Apply a record of a rank of this node."""
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
                for one in session.participants:
                    one.observe(record, at)

    def advance(self, at: float) -> bool:
        """Go on with all captures. Return whether one runs."""
        with self._lock:
            for session in list(self._sessions.values()):
                self._advance(session, at)
            for capture, cost in self._costs.pop_priced(at):
                self._finisher.put_cost(capture, cost)
            busy = bool(self._sessions)
        self._hurry(busy)
        return busy

    def _advance(self, session: CaptureSession, at: float) -> None:
        try:
            if not session.advance(at):
                self.register.keep(session.shown())
                return
            session.cancel()
        except Refused as refused:
            del self._sessions[session.capture.id]
            self._refuse(session, refused)
            self._finisher.write(session.capture)
            return
        except Exception:
            logger.exception("capture %s is given up", session.capture.id)
        self._end(session, at)

    def _end(self, session: CaptureSession, at: float) -> None:
        """Hand a capture over to the finisher: nothing more is expected of its ranks."""
        capture = session.shown()
        self.register.keep(capture)
        del self._sessions[capture.id]
        self._costs.end(capture.id, at)
        self._refusals.forget(capture.request)
        self._finisher.put(session)

    def close(self) -> None:
        """Cancel all captures: the process ends."""
        with self._lock:
            for session in self._sessions.values():
                session.cancel("the daemon ended")

    def retain(self) -> None:
        """Apply the retention of the store; a loop of its own."""
        self.register.retain(self._wall())
        self.register.publish_residuals()


def _supersedes(request: CaptureRequest, session: CaptureSession) -> bool:
    """Return whether the session gives way: stacks do not wait for steps that may not come."""
    running = session.capture.request
    gives_way = request.kind == "stacks" and running.kind != "stacks"
    return gives_way and _is_of_job(session, request)


def _is_of_job(session: CaptureSession, request: CaptureRequest) -> bool:
    return session.capture.request.job_id == request.job_id


def _about(capture: Capture) -> Iterator[str]:
    """Yield what is known at the start. A fleet's capture has no start step yet, stacks none."""
    yield f"{capture.request.kind} of {capture.request.job}"
    yield plural(len(capture.ranks), "rank")
    if capture.start_step is not None:
        yield f"{capture.steps} steps from {capture.start_step}"
    if capture.expected_cost_s is not None:
        yield f"expected to cost {capture.expected_cost_s:.1f} s"
