"""Archives anomalies, the minutes around them, and the state of the detectors.

The pipeline hands over records and changes and never waits for a disk: another loop writes. The
anomalies are in an SQLite file beside the captures. A full or broken disk affects only the history:
failures are counted, and logged once. A file that is not a database is moved aside for a new one. A
file of another version stays, without a history meanwhile.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from warpwatch_daemon.history.context import AFTER_S, Context
from warpwatch_detection.anomalies import snapshot
from warpwatch_detection.anomalies.register import MAX_HISTORY, Change
from warpwatch_detection.anomalies.snapshot import Snapshot
from warpwatch_detection.engine import Detection
from warpwatch_runtime import files
from warpwatch_runtime.files import StateFile
from warpwatch_runtime.log_output import Complaint
from warpwatch_telemetry.anomalies import Anomaly, AnomalyContext
from warpwatch_telemetry.newest import NewestMap
from warpwatch_telemetry.records import Record

logger = logging.getLogger(__name__)

FILE = "anomalies.sqlite"
# One broken file is kept; the next one replaces it.
ASIDE = "anomalies.sqlite.unreadable"
# A write waits this long for a lock. WAL readers hold none, other programs may.
BUSY_TIMEOUT_S = 2.0
# Bytes of an unpacked context; larger ones are not read.
MAX_CONTEXT_BYTES = 2 * 2**20
SCHEMA = 1
_TABLES = f"""
CREATE TABLE IF NOT EXISTS anomalies (
    id TEXT PRIMARY KEY, time REAL NOT NULL, written REAL NOT NULL, ended INTEGER NOT NULL,
    anomaly BLOB NOT NULL, context BLOB
);
CREATE INDEX IF NOT EXISTS anomalies_time ON anomalies (time);
PRAGMA user_version = {SCHEMA};
"""


T = TypeVar("T")
Row = tuple[Any, ...]

# About 5 kB each.
MAX_ROWS = 10_000


class HistoryStore:
    """The stored anomalies, for any thread. ``fail``: called with the failed operation."""

    def __init__(self, folder: Path, max_age_s: float, fail: Callable[[str], None]) -> None:
        self._path = folder / FILE
        self._aside = folder / ASIDE
        self._max_age_s = max_age_s
        self._fail = fail
        self._lock = threading.Lock()
        self.complaint = Complaint(logger)
        self._connection: sqlite3.Connection | None = None

    def write(self, changes: Iterable[tuple[Anomaly, AnomalyContext | None]], now: float) -> bool:
        """Insert or replace anomalies and drop old ones. Return whether that was done."""
        rows = [
            (
                anomaly.id, anomaly.time, now, anomaly.end_time is not None,
                msgspec.msgpack.encode(anomaly), None if context is None else pack(context),
            )
            for anomaly, context in changes
        ]  # fmt: skip
        return self._do("write", lambda connection: self._put(connection, rows, now), False)

    def _put(self, connection: sqlite3.Connection, rows: Sequence[Row], now: float) -> bool:
        with connection:
            connection.executemany(
                "INSERT INTO anomalies VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT (id) DO UPDATE SET "
                "written = excluded.written, ended = excluded.ended, anomaly = excluded.anomaly, "
                "context = coalesce(excluded.context, context)",
                rows,
            )
            connection.execute(
                "DELETE FROM anomalies WHERE time < ?1 AND written < ?1 OR id IN "
                "(SELECT id FROM anomalies ORDER BY time DESC LIMIT -1 OFFSET ?2)",
                (now - self._max_age_s, MAX_ROWS),
            )
        return True

    def newest(self, count: int) -> list[Anomaly]:
        """Return the newest anomalies, oldest first; without an end they get their write time."""
        rows = self._select(
            "SELECT anomaly, written FROM anomalies ORDER BY time DESC LIMIT ?", count
        )
        return list(reversed([found for row in rows for found in _anomaly(*row)]))

    def find(self, ident: str) -> tuple[Anomaly, AnomalyContext | None] | None:
        rows = self._select("SELECT anomaly, written, context FROM anomalies WHERE id = ?", ident)
        for body, written, packed in rows:
            for anomaly in _anomaly(body, written):
                return anomaly, None if packed is None else unpack(packed)
        return None

    def close(self) -> None:
        with self._lock:
            if self._connection is not None:
                self._connection.close()
                self._connection = None

    # --- inside ---

    def _select(self, query: str, *values: object) -> list[Row]:
        return self._do("read", lambda connection: connection.execute(query, values).fetchall(), [])

    def _do(self, what: str, work: Callable[[sqlite3.Connection], T], otherwise: T) -> T:
        """Return the result of ``work``, or ``otherwise`` after a failure, which is counted."""
        with self._lock:
            try:
                if self._connection is None:
                    self._connection = self._open()
                done = work(self._connection)
            except (sqlite3.Error, OSError) as error:
                self._complain(what, error)
                return otherwise
            self.complaint.clear()
            return done

    def _open(self) -> sqlite3.Connection:
        try:
            return self._connect()
        except sqlite3.DatabaseError as error:
            if not _is_broken(error):
                raise
            self._move_aside(error)
            return self._connect()

    def _connect(self) -> sqlite3.Connection:
        # SQLite follows links, and opens by name only.
        files.touch(self._path)
        connection = sqlite3.connect(self._path, timeout=BUSY_TIMEOUT_S, check_same_thread=False)
        try:
            with closing(connection.execute("PRAGMA user_version")) as cursor:
                if cursor.fetchone()[0] not in (0, SCHEMA):
                    raise sqlite3.NotSupportedError("it was written by another version")
            connection.execute("PRAGMA journal_mode = WAL")
            # A power cut may cost the last seconds, never the file.
            connection.execute("PRAGMA synchronous = NORMAL")
            connection.executescript(_TABLES)
        except BaseException:
            connection.close()
            raise
        return connection

    def _move_aside(self, error: Exception) -> None:
        # SQLite itself removes a log that lies beside an empty file.
        self._path.replace(self._aside)
        logger.error("new history of anomalies: %s, old file in %s", error, self._aside)

    def _complain(self, what: str, error: Exception) -> None:
        """Report a failure; the next call opens the file again."""
        self._fail(what)
        if self._connection is not None:
            with suppress(sqlite3.Error):
                self._connection.close()
            self._connection = None
        if _is_broken(error):
            try:
                self._move_aside(error)
                return
            except OSError as unmovable:
                error = unmovable
        self.complaint.make("cannot use the history of anomalies %s: %s", self._path, error)


def _is_broken(error: Exception) -> bool:
    """Return whether the file is not a database; a full disk or a lock is another error."""
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    return code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


def _anomaly(body: bytes, written: float) -> Iterator[Anomaly]:
    """Yield the anomaly of a row, unless it has another form."""
    try:
        anomaly = msgspec.msgpack.decode(body, type=Anomaly)
    except (msgspec.DecodeError, TypeError) as error:
        logger.debug("an anomaly of another form: %s", error)
        return
    if anomaly.end_time is None:
        anomaly = replace(anomaly, end_time=max(anomaly.time, written))
    yield anomaly


def pack(context: AnomalyContext) -> bytes:
    return zlib.compress(msgspec.msgpack.encode(context))


def unpack(packed: bytes) -> AnomalyContext | None:
    """Return the context, or None if it cannot be unpacked."""
    try:
        body = zlib.decompressobj().decompress(packed, MAX_CONTEXT_BYTES)
        return msgspec.msgpack.decode(body, type=AnomalyContext)
    except (zlib.error, msgspec.DecodeError) as error:
        logger.debug("a context of another form: %s", error)
        return None


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

    def restore(
        self, now: float, shown: Callable[[Iterable[Anomaly]], tuple[Anomaly, ...]] = tuple
    ) -> None:
        """Continue where the last daemon stopped. ``now``: wall clock, seconds.

        ``shown`` returns anomalies under the ids with which they are stored.
        """
        detection = self._detection
        saved = self._state.read()
        if saved is not None:
            fresh = snapshot.restore(saved, self.parts)
            if fresh:
                logger.info("detectors that learn from the start: %s", ", ".join(sorted(fresh)))
            if snapshot.ENGINE not in fresh:
                for anomaly in shown(one.anomaly for one in detection.resume(now, fresh)):
                    self._recall(anomaly.id, anomaly)
                    self._note(self._followed[anomaly.id])
        active = {anomaly.id: anomaly for anomaly in shown(detection.active)}
        ended = {anomaly.id for anomaly in shown(detection.history)}
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
