"""Stores anomalies over restarts, in an SQLite file beside the captures.

A full or broken disk affects only the history: failures are counted, and logged once. A file that
is not a database is moved aside for a new one. A file of another version stays, without a history
meanwhile.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from warpwatch_runtime import files
from warpwatch_runtime.log_output import Complaint
from warpwatch_telemetry.anomalies import Anomaly, AnomalyContext

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
                "DELETE FROM anomalies WHERE time < ? OR id IN "
                "(SELECT id FROM anomalies ORDER BY time DESC LIMIT -1 OFFSET ?)",
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
        self._path.replace(self._aside)
        for suffix in ("-wal", "-shm"):
            Path(f"{self._path}{suffix}").unlink(missing_ok=True)
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
