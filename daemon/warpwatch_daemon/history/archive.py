"""Archives anomalies, the minutes around them, and the state of the detectors.

The pipeline hands over records and changes and never waits for a disk: another loop writes.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from warpwatch_daemon.history.context import AFTER_S, Context
from warpwatch_daemon.history.store import HistoryStore
from warpwatch_detection.anomalies import snapshot
from warpwatch_detection.anomalies.register import MAX_HISTORY, Change
from warpwatch_detection.anomalies.snapshot import Snapshot
from warpwatch_detection.engine import Detection
from warpwatch_runtime.files import StateFile
from warpwatch_runtime.log_output import Complaint
from warpwatch_telemetry.anomalies import Anomaly, AnomalyContext
from warpwatch_telemetry.newest import NewestMap
from warpwatch_telemetry.records import Record

logger = logging.getLogger(__name__)

# A context gains a point every ten seconds.
REFRESH_INTERVAL_S = 10.0
SNAPSHOT_INTERVAL_S = 10.0
# After an anomaly was opened or closed: a killed daemon must not open it again.
URGENT_INTERVAL_S = 1.0
# Snapshots of many ranks take at most this share of the pipeline's time.
SNAPSHOT_SHARE = 0.01
# Stored anomalies are kept for a month, to compare with.
MAX_AGE_S = 30 * 86400.0
MAX_CONTEXTS = 64
MAX_QUEUED = 2000
MAX_FOLLOWED = 2000
STATE_FILE = "detectors.state"
# 64 ranks at 200 kB are 13 MB.
MAX_STATE_BYTES = 64 * 2**20

Entry = tuple[Anomaly, AnomalyContext | None]


@dataclass(slots=True)
class _Followed:
    """An anomaly that is active, or recent enough for its context to grow.

    settled: the context is final, as that from an earlier daemon is.
    """

    anomaly: Anomaly
    settled: bool = False


class Archive:
    """The pipeline calls ``restore`` to ``finish``, a loop ``write``, HTTP ``find``.

    ``fail``: called with the failed operation: read, write, snapshot or queue.
    """

    def __init__(
        self,
        folder: Path,
        detection: Detection,
        fail: Callable[[str], None],
        wake: Callable[[], None],
        max_age_s: float = MAX_AGE_S,
        monotonic: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._state: StateFile[Snapshot] = StateFile(
            folder / STATE_FILE, Snapshot, MAX_STATE_BYTES, is_packed=True, is_durable=True
        )
        self._store = HistoryStore(folder, max_age_s, fail)
        self._detection = detection
        # The parts of a snapshot.
        self.parts = detection.parts()
        self._fail = fail
        self._wake = wake
        self._monotonic, self._wall = monotonic, wall
        self._context = Context()
        self._followed: NewestMap[str, _Followed] = NewestMap(MAX_FOLLOWED)
        self._contexts: NewestMap[str, AnomalyContext] = NewestMap(MAX_CONTEXTS)
        self._refreshed_at = self._taken_at = monotonic()
        self._interval_s = SNAPSHOT_INTERVAL_S
        self._urgent = False
        # Between the pipeline and the writer.
        self._lock = threading.Lock()
        # Only one writes at a time: the loop, or ``finish``.
        self._writing = threading.Lock()
        self._queue: dict[str, Entry] = {}
        self._body: bytes | None = None
        self._complaint = Complaint(logger)

    # --- the pipeline's side ---

    def restore(self, now: float) -> None:
        """Continue where the last daemon stopped. ``now``: wall clock, seconds."""
        detection = self._detection
        saved = self._state.read()
        if saved is not None:
            fresh = snapshot.restore(saved, self.parts)
            if fresh:
                logger.info("detectors that learn from the start: %s", ", ".join(sorted(fresh)))
            if snapshot.ENGINE not in fresh:
                for change in detection.resume(now, fresh):
                    self._recall(change.anomaly.id, change.anomaly)
                    self._note(self._followed[change.anomaly.id])
        active = {anomaly.id: anomaly for anomaly in detection.active}
        ended = {anomaly.id for anomaly in detection.history}
        stored = self._store.newest(MAX_HISTORY)
        known = [one for one in stored if one.id not in active and one.id not in ended]
        detection.history.extendleft(reversed(known))
        for ident in (*active, *(one.id for one in known[-MAX_CONTEXTS // 2 :])):
            self._recall(ident, active.get(ident))
        if active:
            logger.info("anomalies that continue after the restart: %s", ", ".join(active))

    def _recall(self, ident: str, followed: Anomaly | None) -> None:
        """Restore the context from the last daemon."""
        found = self._store.find(ident)
        context = None if found is None else found[1]
        if context is not None:
            self._contexts[ident] = context
        if followed is not None:
            self._followed[ident] = _Followed(followed, context is not None)

    def observe(self, record: Record) -> None:
        self._context.observe(record)

    def note_change(self, change: Change) -> None:
        anomaly = change.anomaly
        followed = self._followed.get(anomaly.id)
        if followed is None:
            followed = _Followed(anomaly, anomaly.id in self._contexts)
            self._followed[anomaly.id] = followed
        followed.anomaly = anomaly
        if change.what != "updated":
            self._note(followed)

    def _note(self, followed: _Followed) -> None:
        """Write an anomaly that was opened, closed or opened again, at once."""
        self._refresh(followed)
        self._put(followed)
        self._urgent = True

    def advance(self, now: float) -> None:
        """Refresh contexts and take a snapshot if it is time; once a round. ``now``: wall clock."""
        at = self._monotonic()
        if at - self._refreshed_at >= REFRESH_INTERVAL_S:
            self._refreshed_at = at
            # Contexts that would be evicted are not computed.
            hidden = len(self._followed) - MAX_CONTEXTS
            for index, (ident, followed) in enumerate(list(self._followed.items())):
                self._follow(ident, followed, now, shown=index >= hidden)
        passed_s = at - self._taken_at
        if passed_s >= self._interval_s or (self._urgent and passed_s >= URGENT_INTERVAL_S):
            self._take_snapshot(at)

    def _follow(self, ident: str, followed: _Followed, now: float, *, shown: bool) -> None:
        anomaly = followed.anomaly
        over = now - anomaly.time > AFTER_S + REFRESH_INTERVAL_S
        if shown or over:
            self._refresh(followed)
        if over and not followed.settled:
            self._put(followed)
            followed.settled = True
        if anomaly.end_time is not None and followed.settled:
            del self._followed[ident]

    def _refresh(self, followed: _Followed) -> None:
        if not followed.settled:
            anomaly = followed.anomaly
            self._contexts[anomaly.id] = self._context.around(anomaly)

    def _put(self, followed: _Followed) -> None:
        anomaly = followed.anomaly
        context = self._contexts.get(anomaly.id)
        with self._lock:
            self._queue.pop(anomaly.id, None)
            # An unknown context replaces none.
            self._queue[anomaly.id] = (anomaly, context if context and context.series else None)
            if len(self._queue) > MAX_QUEUED:
                del self._queue[next(iter(self._queue))]
                self._fail("queue")
        self._wake()

    def _take_snapshot(self, at: float) -> None:
        body = snapshot.save(self.parts)
        with self._lock:
            self._body = body
        took_s = self._monotonic() - at
        self._interval_s = max(SNAPSHOT_INTERVAL_S, took_s / SNAPSHOT_SHARE)
        self._taken_at, self._urgent = at, False
        self._wake()

    def contexts(self) -> Mapping[str, AnomalyContext]:
        """Return contexts by anomaly: of active ones, and of some that ended."""
        return dict(self._contexts)

    def finish(self) -> None:
        """Write everything, after the last record."""
        for followed in self._followed.values():
            self._put(followed)
        self._take_snapshot(self._monotonic())
        self.write()
        self._store.close()

    # --- the writer's side ---

    def write(self) -> None:
        """Write pending changes; keep failed ones."""
        with self._writing:
            with self._lock:
                queue, self._queue = self._queue, {}
                body, self._body = self._body, None
            if queue and not self._store.write(queue.values(), self._wall()):
                self._put_back(queue)
            if body is not None:
                self._save(body)

    def _put_back(self, queue: dict[str, Entry]) -> None:
        """Queue failed entries again, before newer ones and replaced by them; drop the oldest."""
        with self._lock:
            for ident, (anomaly, context) in self._queue.items():
                before = queue.pop(ident, None)
                # An unknown context replaces none.
                queue[ident] = (anomaly, context or (before[1] if before else None))
            self._queue = queue
            for ident in list(queue)[:-MAX_QUEUED]:
                del queue[ident]
                self._fail("queue")

    def _save(self, body: bytes) -> None:
        try:
            self._state.write(body)
        except OSError as error:
            self._fail("snapshot")
            self._complaint.make("cannot save the state of the detectors: %s", error)
        else:
            self._complaint.clear()

    # --- what HTTP asks ---

    def problems(self) -> Iterator[str]:
        """Yield what cannot be written or read now."""
        yield from filter(None, (self._store.complaint.text, self._complaint.text))

    def find(self, ident: str) -> tuple[Anomaly, AnomalyContext | None] | None:
        """Return an anomaly from the store. May wait for the disk."""
        return self._store.find(ident)
