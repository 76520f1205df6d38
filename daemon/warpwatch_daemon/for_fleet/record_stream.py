"""The newest lines of the telemetry log and of changes, in memory, for followers of this node.

Lines are kept only while a follower reads, or for one that waits for the bus.
"""

from __future__ import annotations

import re
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from warpwatch_telemetry.anomalies import DEVICE_KINDS, Anomaly
from warpwatch_telemetry.captures import Capture
from warpwatch_telemetry.jobs import JobId, RunSummary, shard_key
from warpwatch_telemetry.log import encode_line
from warpwatch_telemetry.newest import put_newest
from warpwatch_telemetry.records import Clock, DeviceReading, End, RankEvent, RankSeen, Record, Step
from warpwatch_telemetry.stream import (
    AnomalyLine,
    CaptureLine,
    GapLine,
    RunLine,
    encode_stream_line,
)

MAX_BYTES = 16 * 2**20
# A restarted reader rebuilds its state from the lines of this time. A node without a reader for
# as long keeps no lines.
KEPT_S = 600.0
DEVICE_INTERVAL_S = 5.0
MAX_BATCH_BYTES = 256 * 2**10
# A new reader receives this many live ranks first: as many as there may be rings.
MAX_RANKS = 1024
# It receives this many captures: those that it waits for may have ended.
MAX_CAPTURES = 20
MAX_RUNS = 20
MAX_DEVICES = 128

_CURSOR = re.compile(r"(?P<epoch>[0-9a-f]{8})-(?P<number>\d{1,18})")


class Portion(NamedTuple):
    """Lines with their keys (of a job, None for the node's own), and the cursor after them.

    more: whether there are newer lines already.
    """

    lines: list[tuple[int | None, bytes]]
    cursor: str
    more: bool

    def text(self, index: int = 0, of: int = 1) -> bytes:
        """Return the lines for the reader at ``index`` of ``of`` readers that share the jobs."""
        return b"".join(line for key, line in self.lines if key is None or key % of == index)


class _Line(NamedTuple):
    number: int
    at: float
    key: int | None
    text: bytes


class RecordStream:
    """The stream. Only the pipeline calls ``put…``; others may be called from any thread."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._lock = threading.Lock()
        # Cursors of another epoch do not fit the lines of this one.
        self._epoch = secrets.token_hex(4)
        self._lines: deque[_Line] = deque()
        self._bytes = 0
        self._count = 0
        self._read_at: float | None = None
        self._is_kept = False
        self._ranks: dict[tuple[JobId, int], RankSeen] = {}
        self._anomalies: dict[str, Anomaly] = {}
        self._captures: dict[str, Capture] = {}
        self._runs: dict[JobId, RunSummary] = {}
        self._shown: Sequence[Capture] = ()
        self._device_at: dict[str, float] = {}
        self._devices: dict[str, bytes] = {}
        # Followers check it, so that the server need not wait for them at its end.
        self.closed = False

    def close(self) -> None:
        self.closed = True

    def keep(self) -> None:
        """Keep lines from now on though no reader comes: it waits for the bus."""
        self._is_kept = True

    # --- writing ---

    def put(self, records: Iterable[Record]) -> None:
        with self._lock:
            self._follow_ranks(records := list(records))
            if self._is_read():
                for record in self._thinned(records):
                    line = encode_line(record)
                    self._add(_key(record), line)
                    if isinstance(record, DeviceReading) and line is not None:
                        put_newest(self._devices, record.device, line, MAX_DEVICES)

    def put_anomaly(self, anomaly: Anomaly) -> None:
        """Add an anomaly that has changed in any way."""
        with self._lock:
            if anomaly.end_time is None:
                self._anomalies[anomaly.id] = anomaly
            else:
                self._anomalies.pop(anomaly.id, None)
            if self._is_read():
                self._add(_anomaly_key(anomaly), encode_stream_line(AnomalyLine(anomaly)))

    def put_captures(self, captures: Sequence[Capture]) -> None:
        """Stream the captures that have changed; ``captures`` are all that are shown."""
        with self._lock:
            if captures is self._shown:
                return
            self._shown = captures
            before, self._captures = self._captures, {one.id: one for one in captures}
            if not self._is_read():
                return
            for capture in self._captures.values():
                if before.get(capture.id) is not capture:
                    key = shard_key(capture.request.job_id)
                    self._add(key, encode_stream_line(CaptureLine(capture)))

    def put_runs(self, summaries: Iterable[RunSummary]) -> None:
        with self._lock:
            for summary in summaries:
                put_newest(self._runs, summary.job_id, summary, MAX_RUNS)
                if self._is_read():
                    self._add(shard_key(summary.job_id), encode_stream_line(RunLine(summary)))

    # --- reading ---

    def portion(self, after: str | None) -> Portion:
        """Return lines after the cursor, oldest first; without one, the live state and all lines.

        There may be none. Raises ValueError if ``after`` is not a cursor.
        """
        epoch, number = _parse(after)
        with self._lock:
            self._forget_old()
            self._read_at = self._monotonic()
            lines: list[tuple[int | None, bytes]] = []
            first = self._count - len(self._lines)
            if after is None or epoch != self._epoch:
                lines = [] if after is None else [(None, encode_stream_line(GapLine()))]
                lines += self._live()
                number = first
            elif number < first:
                lines = [(None, encode_stream_line(GapLine(first - number))), *self._live()]
                number = first
            size = 0
            for line in self._after(number):
                if size >= MAX_BATCH_BYTES:
                    break
                number = line.number
                lines.append((line.key, line.text))
                size += len(line.text)
            return Portion(lines, f"{self._epoch}-{number}", number < self._count)

    def live(self) -> list[tuple[int | None, bytes]]:
        """Return the current state, and the newest line of each device."""
        with self._lock:
            return [*self._live(), *((None, text) for text in self._devices.values())]

    def live_keys(self) -> set[int]:
        """Return the keys of the jobs with a live rank."""
        with self._lock:
            return {shard_key(job) for job, _ in self._ranks}

    def _live(self) -> Iterator[tuple[int | None, bytes]]:
        """Yield the current state, for a reader that has missed the lines of its start."""
        for record in self._ranks.values():
            yield _key(record), encode_line(record) or b""
        for anomaly in self._anomalies.values():
            yield _anomaly_key(anomaly), encode_stream_line(AnomalyLine(anomaly))
        for capture in list(self._captures.values())[-MAX_CAPTURES:]:
            yield shard_key(capture.request.job_id), encode_stream_line(CaptureLine(capture))
        for run in self._runs.values():
            yield shard_key(run.job_id), encode_stream_line(RunLine(run))

    def _after(self, number: int) -> Iterator[_Line]:
        """Return the lines after a number. Readers are mostly near the end: search from there."""
        newer = 0
        for line in reversed(self._lines):
            if line.number <= number:
                break
            newer += 1
        return (self._lines[at] for at in range(-newer, 0))

    # --- keeping ---

    def _is_read(self) -> bool:
        self._forget_old()
        return self._is_kept or self._read_at is not None

    def _add(self, key: int | None, text: bytes | None) -> None:
        if text is None:
            return
        self._count += 1
        self._lines.append(_Line(self._count, self._monotonic(), key, text))
        self._bytes += len(text)

    def _forget_old(self) -> None:
        now = self._monotonic()
        if not self._is_kept and self._read_at is not None and now - self._read_at > KEPT_S:
            self._read_at = None
            self._lines.clear()
            self._bytes = 0
            self._epoch = secrets.token_hex(4)
        while self._lines and (self._bytes > MAX_BYTES or now - self._lines[0].at > KEPT_S):
            self._bytes -= len(self._lines.popleft().text)

    def _follow_ranks(self, records: Iterable[Record]) -> None:
        for record in records:
            if isinstance(record, RankSeen):
                put_newest(self._ranks, (record.job_id, record.rank), record, MAX_RANKS)
            elif isinstance(record, End) and record.rank is None:
                for key in [key for key in self._ranks if key[0] == record.job_id]:
                    del self._ranks[key]
            elif isinstance(record, End) or (
                isinstance(record, RankEvent) and record.event == "died"
            ):
                self._ranks.pop((record.job_id, record.rank or 0), None)

    def _thinned(self, records: Iterable[Record]) -> Iterator[Record]:
        """Yield one reading per device and DEVICE_INTERVAL_S, no clocks, and no iterations.

        A fleet gets the iterations of a server summed up, in its record of each second.
        """
        now = self._monotonic()
        for record in records:
            if isinstance(record, Clock) or (isinstance(record, Step) and record.work_class):
                continue
            if isinstance(record, DeviceReading):
                if now - self._device_at.get(record.device, float("-inf")) < DEVICE_INTERVAL_S:
                    continue
                self._device_at[record.device] = now
            yield record


def _parse(cursor: str | None) -> tuple[str, int]:
    match = _CURSOR.fullmatch(cursor or "")
    if match is None:
        if cursor is None:
            return "", 0
        raise ValueError("a cursor of this stream is needed")
    return match["epoch"], int(match["number"])


def _key(record: Record) -> int | None:
    return None if isinstance(record, Clock | DeviceReading) else shard_key(record.job_id)


def _anomaly_key(anomaly: Anomaly) -> int | None:
    job = anomaly.job_id
    return None if job is None or anomaly.kind in DEVICE_KINDS else shard_key(job)
