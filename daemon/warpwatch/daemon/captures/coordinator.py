"""One path for all captures: request → policy → ranks → files → store → diagnosis."""

from __future__ import annotations

import logging
import queue
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from warpwatch.daemon.captures import child
from warpwatch.daemon.captures.policy import Policy
from warpwatch.daemon.captures.session import Session, Target
from warpwatch.daemon.captures.store import Store, read_diagnosis
from warpwatch.daemon.errors import Refused
from warpwatch.daemon.hub import Hub
from warpwatch.daemon.rendezvous import inbox
from warpwatch.daemon.rendezvous.commands import CommandFiles
from warpwatch.daemon.rendezvous.folder import RendezvousFolder
from warpwatch.daemon.sources.ranks import RanksSource
from warpwatch.telemetry.captures import Capture, CaptureRequest, RankCapture
from warpwatch.telemetry.records import End, RankEvent, Record, Step

logger = logging.getLogger(__name__)

# Captures that the state shows; older ones stay in the store.
SHOWN = 200
# How long to wait for the steps after a capture before its price is written down.
COST_TIMEOUT_S = 60.0
# Files that nobody collected: of captures that this daemon no longer knows.
SWEEP_AFTER_S = 3600.0


class Coordinator:
    """``observe`` and ``advance`` are the pipeline's; ``request`` may be called from any thread.

    ``hurry`` is told whether a capture runs, so that the pipeline looks more often.
    """

    def __init__(
        self,
        policy: Policy,
        store: Store,
        folder: RendezvousFolder,
        ranks: RanksSource,
        hub: Hub,
        hurry: Callable[[bool], None],
        wake_finisher: Callable[[], None],
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.policy = policy
        self._store = store
        self._inbox = folder.inbox
        self._commands = CommandFiles(folder.commands)
        self._ranks = ranks
        self._hub = hub
        self._hurry = hurry
        self._wake_finisher = wake_finisher
        self._lock = threading.RLock()
        self._sessions: dict[str, Session] = {}
        self._costs: dict[str, tuple[Session, float]] = {}
        self._finishing: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._saving = threading.Lock()
        self._monotonic = monotonic
        self._captures = {capture.id: capture for capture in store.load(SHOWN)}
        self._resume()
        self._publish()

    # --- any thread ---

    def request(self, request: CaptureRequest) -> Capture:
        """Begin a capture. Raises Refused; every answer is counted."""
        now, at = time.time(), self._monotonic()
        with self._lock:
            try:
                targets = self._targets(request)
                self.policy.check(request, self._busy(request.job), at)
                session = self._begin(request, targets, now, at)
            except Refused as error:
                self._hub.count("captures_total", request.kind, request.trigger, error.reason)
                logger.info("no %s capture of %s: %s", request.kind, request.job, error)
                raise
            self.policy.begun(request, at)
            self._sessions[session.capture.id] = session
            capture = self._shown(session)
            self._keep(capture)
        self._hurry(True)
        logger.info(
            "capture %s: %s of %s, %d ranks, from step %s (%s)",
            session.capture.id,
            request.kind,
            request.job,
            len(targets),
            session.capture.start_step,
            request.reason or request.trigger,
        )
        return capture

    def is_busy(self, job: str) -> bool:
        with self._lock:
            return bool(self._busy(job))

    def file(self, capture_id: str, name: str) -> Path | None:
        with self._lock:
            capture = self._captures.get(capture_id)
        if capture is None or capture.folder is None or name not in capture.files:
            return None
        path = Path(capture.folder) / name
        return path if path.is_file() else None

    def _targets(self, request: CaptureRequest) -> dict[int, Target]:
        if request.kind not in inbox.SUFFIX:
            raise Refused("refused_disabled", f"captures of kind {request.kind} are not built yet")
        live = self._ranks.targets(request.job)
        if not live:
            raise Refused("refused_no_rank", f"no running rank of job {request.job!r} is known")
        unknown = sorted(set(request.ranks or ()) - set(live))
        if unknown:
            names = ", ".join(map(str, unknown))
            raise Refused("refused_no_rank", f"{request.job} has no running rank {names} here")
        return {
            number: Target(rank, rank.ring.name, rank.owner_uid)
            for number, rank in sorted(live.items())
            if rank.ring is not None and (request.ranks is None or number in request.ranks)
        }

    def _busy(self, job: str) -> list[int]:
        return [
            number
            for session in self._sessions.values()
            if session.capture.request.job == job
            for number in session.targets
        ]

    def _begin(
        self, request: CaptureRequest, targets: dict[int, Target], now: float, at: float
    ) -> Session:
        name = time.strftime("%Y%m%dT%H%M%S", time.gmtime(now)) + "-" + secrets.token_hex(3)
        world_size = max(target.rank.claims.world_size for target in targets.values())
        try:
            folder = self._store.folder(name, now)
            capture = Capture(name, request, now, world_size=world_size, folder=str(folder))
            # Known to retention from the first moment, whenever this daemon may be killed.
            self._store.save(capture)
        except OSError as error:
            raise Refused("refused_disk", f"{self._store.path}: {error.strerror}") from error
        return Session(capture, targets, self.policy.config, self._send, self._ranks.step_begun, at)

    def _resume(self) -> None:
        """After a restart: what was running is over, and what was taken counts on."""
        now, at = time.time(), self._monotonic()
        for capture in list(self._captures.values()):
            if capture.outcome is None:
                self._update(capture.id, outcome="failed", detail="the daemon ended meanwhile")
                logger.warning("capture %s was running when the daemon ended", capture.id)
            self.policy.begun(capture.request, at - max(0.0, now - capture.time))

    def _send(self, target: Target, command: dict[str, Any]) -> None:
        try:
            self._commands.send(target.ring_name, command)
        except OSError as error:
            # The rank then does not answer and is reported missing.
            logger.warning("cannot send to %s: %s", target.ring_name, error)

    # --- the pipeline ---

    def observe(self, record: Record) -> None:
        if not isinstance(record, RankEvent | Step | End):
            return
        with self._lock:
            if isinstance(record, Step):
                costs = [session for session, _ in self._costs.values()]
                for session in [*self._sessions.values(), *costs]:
                    session.observe_step(record)
            else:
                at = self._monotonic()
                for session in self._sessions.values():
                    session.observe(record, at)

    def advance(self, at: float) -> None:
        with self._lock:
            for name, session in list(self._sessions.items()):
                ended = session.advance(at)
                self._keep(self._shown(session))
                if ended:
                    session.cancel()
                    del self._sessions[name]
                    self._costs[name] = (session, at)
                    self._put_off(partial(self._finish, session))
            for name, (session, since) in list(self._costs.items()):
                if session.cost.complete or at - since >= COST_TIMEOUT_S:
                    del self._costs[name]
                    self._put_off(partial(self._note_cost, name, session))
            busy = bool(self._sessions)
        self._hurry(busy)

    def _put_off(self, work: Callable[[], None]) -> None:
        self._finishing.put(work)
        self._wake_finisher()

    def _note_cost(self, name: str, session: Session) -> None:
        if session.capture.request.kind == "torch":
            self._update(name, step_s=session.cost.medians())

    @staticmethod
    def _shown(session: Session) -> Capture:
        return replace(session.capture, ranks=tuple(session.ranks.values()))

    # --- the finisher: everything that touches a disk ---

    def finish(self) -> None:
        """Take over the files of ended captures and diagnose them; a loop of its own."""
        while True:
            try:
                work = self._finishing.get_nowait()
            except queue.Empty:
                return
            work()

    def _finish(self, session: Session) -> None:
        name, request = session.capture.id, session.capture.request
        try:
            outcome = self._collect_and_diagnose(session)
        except Exception as error:
            # Whatever it was, nobody waits for this capture for ever.
            logger.exception("capture %s could not be finished", name)
            outcome = "failed"
            self._update(name, outcome=outcome, detail=f"{type(error).__name__}: {error}")
        self._hub.count("captures_total", request.kind, request.trigger, outcome)

    def _collect_and_diagnose(self, session: Session) -> str:
        """The outcome; the capture is complete when every rank's file is there and readable."""
        capture = session.capture
        assert capture.folder is not None
        folder, kind = Path(capture.folder), capture.request.kind
        ranks = tuple(self._take(session, rank, folder) for rank in session.ranks.values())
        files = tuple(rank.file for rank in ranks if rank.file)
        missing = [rank.rank for rank in ranks if not rank.file]
        detail = "; ".join(f"rank {rank.rank}: {rank.detail}" for rank in ranks if not rank.file)
        self._update(capture.id, ranks=ranks, end_time=time.time(), detail=detail, files=files)
        result = child.diagnose(kind, folder, files, missing) if files else "no files"
        outcome = "partial" if missing and files else "complete" if files else "failed"
        if result == "no_memory":
            outcome = result
        elif result.startswith(child.UNREADABLE):
            outcome = "failed"
            detail = "; ".join(filter(None, (detail, result)))
        made = tuple(name for name in child.FILES if (folder / name).is_file())
        self._update(
            capture.id,
            outcome=outcome,
            detail=detail,
            files=files + made,
            diagnosis=read_diagnosis(folder),
            diagnosis_outcome=result,
        )
        logger.info(
            "capture %s: %s %d/%d%s; diagnosis: %s",
            capture.id,
            outcome,
            len(files),
            len(ranks),
            f" ({detail})" if detail else "",
            result,
        )
        return outcome

    def _take(self, session: Session, rank: RankCapture, folder: Path) -> RankCapture:
        if rank.detail == "no_inbox":
            hint = f"no_inbox: start the training with WARPWATCH_INBOX={self._inbox}"
            return replace(rank, detail=hint)
        if rank.state != "exported":
            return rank
        name = f"rank{rank.rank}{inbox.SUFFIX[session.capture.request.kind]}"
        owner_uid = session.targets[rank.rank].owner_uid
        try:
            inbox.take(self._inbox, session.file_name(rank.rank), owner_uid, folder / name)
        except inbox.InboxError as error:
            return replace(rank, state="failed", detail=str(error))
        except OSError as error:
            return replace(rank, state="failed", detail=f"the store: {error.strerror}")
        return replace(rank, state="written", file=name)

    def retain(self) -> None:
        """Retention of the store and of the inbox; a loop of its own."""
        now = time.time()
        with self._lock:
            captures = list(self._captures.values())
        kept, size = self._store.retain(captures, now)
        with self._lock:
            gone = {capture.id for capture in captures} - {capture.id for capture in kept}
            for name in gone:
                self._captures.pop(name, None)
            self._publish()
        self._hub.gauge("store_bytes", size)
        self._hub.gauge("store_captures", len(kept))
        inbox.sweep(self._inbox, SWEEP_AFTER_S, now)

    # --- what is known ---

    def _update(self, capture_id: str, **changes: Any) -> None:
        """Change what is known of a capture, in memory and in its folder."""
        with self._lock:
            capture = self._captures.get(capture_id)
            if capture is None:
                return
            self._keep(replace(capture, **changes))
        with self._saving:
            try:
                self._store.save(self._captures[capture_id])
            except (OSError, KeyError) as error:
                logger.error("cannot write capture %s: %s", capture_id, error)

    def _keep(self, capture: Capture) -> None:
        if self._captures.get(capture.id) != capture:
            self._captures[capture.id] = capture
            self._publish()

    def _publish(self) -> None:
        self._hub.publish_captures(tuple(list(self._captures.values())[-SHOWN:]))
