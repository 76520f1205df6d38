"""The captures in memory, each also stored in its folder."""

from __future__ import annotations

import logging
import math
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Set
from dataclasses import replace
from pathlib import Path
from typing import Any

from warpwatch_capturing.participant import Board
from warpwatch_capturing.policy import Known
from warpwatch_capturing.store import Store
from warpwatch_telemetry.captures import (
    INTERRUPTED,
    OUTCOMES,
    REGULAR_TRIGGERS,
    Capture,
    CaptureRequest,
)
from warpwatch_telemetry.jobs import JobId

logger = logging.getLogger(__name__)

# Captures that the state shows; older ones stay in the store.
SHOWN = 200
# The part of SHOWN for captures without a folder, per outcome.
SHOWN_REFUSED = 10
# The kind of a run that is slower than the job's runs before: it has no healthy time of its own.
RUN_REGRESSION = "run_regression"


class CaptureRegister:
    """The captures of this process. All methods are thread-safe."""

    def __init__(self, store: Store, board: Board, wall: Callable[[], float] = time.time) -> None:
        self.store = store
        self._board = board
        self._lock = threading.RLock()
        self._saving = threading.Lock()
        # Jobs whose residual is shown.
        self._with_residual: Set[tuple[str, str]] = frozenset()
        self._captures = {capture.id: capture for capture in store.load(SHOWN)}
        # Versions before kept all that were refused after their start.
        for outcome in (name for name in OUTCOMES if name.startswith("refused_")):
            self._trim_refused(outcome, SHOWN_REFUSED)
        self._end_interrupted(wall())
        self._publish()

    def _end_interrupted(self, now: float) -> None:
        for capture in self.all():
            if capture.outcome is None:
                detail = f"{INTERRUPTED}the daemon ended meanwhile"
                self.update(capture.id, outcome="failed", detail=detail, end_time=now)
                request, metrics = capture.request, self._board.metrics
                metrics.count_interrupted(request.kind, request.trigger, request.owner)
                logger.warning("capture %s was running when the daemon ended", capture.id)

    def all(self) -> list[Capture]:
        """Return all captures in the order of their requests."""
        with self._lock:
            return list(self._captures.values())

    def get(self, capture_id: str) -> Capture | None:
        with self._lock:
            return self._captures.get(capture_id)

    def refuse(self, capture: Capture) -> None:
        """Show a capture that was refused; only the newest few are kept, here and on disk."""
        with self._lock:
            self._trim_refused(capture.outcome, SHOWN_REFUSED - 1)
            self.keep(capture)

    def _trim_refused(self, outcome: str | None, kept: int) -> None:
        """Remove all captures with this outcome but the newest few, with their folders."""
        refused = [c.id for c in self._captures.values() if c.outcome == outcome]
        for capture_id in refused[:-kept]:
            folder = self._captures.pop(capture_id).folder
            if folder is not None:
                shutil.rmtree(folder, ignore_errors=True)

    def file(self, capture_id: str, name: str, owner: str | None = None) -> Path | None:
        """Return the path of a capture's file, which may have been removed.

        ``owner``: the required owner, or None for any.
        """
        capture = self.get(capture_id)
        if capture is not None and owner not in (None, capture.request.owner):
            return None
        if capture is None or capture.folder is None or name not in capture.files:
            return None
        return Path(capture.folder) / name

    def is_running(self, capture_id: str) -> bool:
        capture = self.get(capture_id)
        return capture is not None and capture.outcome is None

    def keep(self, capture: Capture) -> None:
        """Show it as it is now; on disk it is written by ``update``."""
        with self._lock:
            if self._captures.get(capture.id) != capture:
                self._captures[capture.id] = capture
                self._publish()

    def update(self, capture_id: str, **changes: Any) -> None:
        """Change what is known of a capture, in memory and in its folder."""
        with self._lock:
            capture = self._captures.get(capture_id)
            if capture is None:
                return
            self.keep(replace(capture, **changes))
        if capture.folder is None:
            return
        with self._saving:
            try:
                self.store.save(self._captures[capture_id])
            except (OSError, KeyError) as error:
                logger.error("cannot write capture %s: %s", capture_id, error)

    def with_folder(self, capture: Capture) -> Capture:
        """Return the capture with its folder, which need not exist yet."""
        return replace(capture, folder=str(self.store.folder(capture.id, capture.time)))

    def create(self, capture_id: str) -> Capture:
        """Make the capture's folder, with its record as it is now. Raises OSError."""
        with self._saving:
            capture = self._captures[capture_id]
            if capture.folder is None:
                capture = self.with_folder(capture)
            self.store.create(capture)
        with self._lock:
            self.keep(replace(self._captures[capture_id], folder=capture.folder))
        return capture

    def known_events(self, request: CaptureRequest) -> Known | None:
        """Return the events per step of the newest verified capture of the same job and options."""
        for capture in reversed(self.all()):
            asked = capture.request
            same = (asked.owner, asked.job, asked.kind, asked.options)
            wanted = (request.owner, request.job, request.kind, request.options)
            if same != wanted or not capture.steps:
                continue
            events = [rank.events for rank in capture.ranks if rank.verified and rank.events]
            if events:
                event_s = max(0.0, capture.cost_s or 0.0) / max(events)
                return Known(-(-max(events) // capture.steps), event_s or None)
        return None

    def baseline(self, job: JobId, now: float) -> Capture | None:
        """Return the newest complete regular capture of this run of the job."""
        return next((c for c in self._regular(now) if c.request.job_id == job), None)

    def earlier_baseline(self, job: JobId, now: float) -> Capture | None:
        """Return the newest of an earlier run of the job that was not slow itself."""
        slow = {c.request.job_id for c in self.all() if c.request.anomaly_kind == RUN_REGRESSION}
        others = (c for c in self._regular(now) if c.request.job_id not in {job, *slow})
        return next((c for c in others if _is_of(job, c.request.job_id)), None)

    def _regular(self, now: float) -> Iterator[Capture]:
        """Yield the complete regular captures of before ``now``, newest first."""
        for capture in reversed(self.all()):
            asked = capture.request
            is_regular = asked.trigger in REGULAR_TRIGGERS and asked.kind == "torch"
            if is_regular and capture.outcome == "complete" and capture.time < now:
                yield capture

    def retain(self, now: float) -> None:
        """Apply the retention of the store."""
        # Folders come first: each is made for a capture that is already in memory.
        folders = self.store.folders()
        captures = self.all()
        baselines = [self.baseline(job, now) for job in self._began()]
        last = {capture.id for capture in baselines if capture is not None}
        kept, size = self.store.retain(captures, now, last, folders)
        gone = {capture.id for capture in captures} - {capture.id for capture in kept}
        with self._lock:
            for capture_id in gone:
                self._captures.pop(capture_id, None)
            self._publish()
        self._board.metrics.gauge("store_bytes").set(size)
        self._board.metrics.gauge("store_captures").set(len(kept))

    def publish_residuals(self) -> None:
        """Publish the newest residual of each job that runs, for this run."""
        began = self._began()
        ratios = {
            (capture.request.job, capture.request.owner): capture.residual.ratio
            for capture in self.all()
            if capture.residual is not None
            and capture.time >= began.get(capture.request.job_id, math.inf)
        }
        residuals = self._board.metrics.gauge("capture_residual_ratio")
        with self._lock:
            for job in self._with_residual - ratios.keys():
                residuals.remove(*job)
            for job, ratio in ratios.items():
                residuals.labels(*job).set(ratio)
            self._with_residual = ratios.keys()

    def _began(self) -> dict[JobId, float]:
        began: dict[JobId, float] = {}
        for rank in self._board.ranks():
            if rank.status == "running":
                before = began.get(rank.job_id, rank.first_time)
                began[rank.job_id] = min(rank.first_time, before)
        return began

    def _publish(self) -> None:
        self._board.publish(captures=tuple(list(self._captures.values())[-SHOWN:]))


def _is_of(job: JobId, other: JobId) -> bool:
    """Return whether owner and name are the same; a second live run is ``name#<6 digits>``."""
    names = {one.name.partition("#")[0] for one in (job, other)}
    return job.owner == other.owner and len(names) == 1
