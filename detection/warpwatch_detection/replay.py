"""Reads a telemetry log and says what the daemon would have found, in event time."""

from __future__ import annotations

import contextlib
import gzip
import io
import itertools
import json
import sys
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import cast

from warpwatch_detection.anomalies.register_state import Suppressed
from warpwatch_detection.config import AnomaliesConfig, DetectionConfig
from warpwatch_detection.detector import DetectorStatus
from warpwatch_detection.engine import Detection
from warpwatch_telemetry.anomalies import Anomaly
from warpwatch_telemetry.errors import UsageError
from warpwatch_telemetry.log import Decoder
from warpwatch_telemetry.records import End, RankEvent, Record, Step

# Lines without a single record after which a file is no telemetry log.
MAX_STRANGE_LINES = 100
MAX_REASONS = 20
_GZIP_MAGIC = b"\x1f\x8b"
BLOCK_SIZE = 1 << 16
# What a line that is no record may raise.
_UNREADABLE = (ValueError, RecursionError, OverflowError)
# A number below is a step, one from here on a wall clock (September 2001).
FIRST_TIME_S = 1e9


def read_lines(path: Path) -> Iterator[bytes]:
    """The log at ``path``, of standard input for ``-``, unpacked if it is gzip: whole lines, many
    at a time, but of what somebody is still writing as soon as they are there.

    Only the last line may lack its end. Raises UsageError when the log cannot be read.
    """
    try:
        if str(path) == "-":
            yield from _whole_lines(_unpacked(cast(io.BufferedReader, sys.stdin.buffer)))
        else:
            with path.open("rb") as plain:
                yield from _whole_lines(_unpacked(plain))
    except (OSError, zlib.error) as error:
        raise UsageError(f"{path}: {getattr(error, 'strerror', None) or error}") from error


def _unpacked(plain: io.BufferedReader) -> Iterator[bytes]:
    """A gzip file that is still being written ends where what is there of it ends."""
    packed = plain.peek(2)[:2] == _GZIP_MAGIC
    file = gzip.GzipFile(fileobj=plain) if packed else plain
    with contextlib.suppress(EOFError):
        while block := file.read1(BLOCK_SIZE):
            yield block


def _whole_lines(blocks: Iterable[bytes]) -> Iterator[bytes]:
    begun: list[bytes] = []
    for block in blocks:
        whole, end, rest = block.rpartition(b"\n")
        if end:
            yield b"".join((*begun, whole, end))
            begun.clear()
        begun.append(rest)
    if last := b"".join(begun):
        yield last


class LogReader:
    """Lines in, records out; ``bad`` counts the lines that are none, by reason.

    A last line without its end is still being written: it counts only if it is a record already.
    """

    def __init__(self) -> None:
        self.good = 0
        self.bad: Counter[str] = Counter()
        self.first_bad: tuple[int, str] | None = None
        self._decoder = Decoder()
        self._lines = 0
        self._unfinished: tuple[int, Exception] | None = None

    def records(self, lines: Iterable[str | bytes]) -> Iterator[Record]:
        """Of ``lines``, one or more at a time.

        Raises UsageError when nothing in them is a telemetry record.
        """
        return itertools.chain.from_iterable(self._blocks(lines))

    def _blocks(self, lines: Iterable[str | bytes]) -> Iterator[Iterable[Record]]:
        self._decoder, self._lines, self._unfinished = Decoder(), 0, None
        for some in lines:
            for part in _parts(some if isinstance(some, bytes) else some.encode(errors="replace")):
                if self._unfinished:
                    self._reject(*self._unfinished)
                    self._unfinished = None
                try:
                    records = self._decoder.decode_lines(part)
                except _UNREADABLE:
                    yield self._one_by_one(part)
                    continue
                self._lines += len(records)
                self.good += len(records)
                yield records
        if not self.good:
            if self._unfinished:
                self._reject(*self._unfinished)
            raise UsageError("no telemetry log: " + (self.complaint() or "it is empty"))

    def _one_by_one(self, lines: bytes) -> Iterator[Record]:
        for line in io.BytesIO(lines):
            self._lines += 1
            try:
                record = self._decoder.decode_line(line)
            except _UNREADABLE as error:
                if line[-1:] != b"\n":
                    self._unfinished = self._lines, error
                elif line.strip():
                    self._reject(self._lines, error)
                continue
            self.good += 1
            yield record

    def complaint(self) -> str:
        """One line about the bad lines, empty if there were none."""
        if self.first_bad is None:
            return ""
        number, text = self.first_bad
        reasons = ", ".join(f"{reason} {count}" for reason, count in self.bad.most_common(4))
        return f"{self.bad.total()} bad lines ({reasons}), the first is line {number}: {text}"

    def _reject(self, number: int, error: Exception) -> None:
        text = " ".join(str(error).split())[:200]
        reason = "not JSON" if isinstance(error, json.JSONDecodeError) else ""
        reason = reason or text.partition(":")[0][:40]
        if reason not in self.bad and len(self.bad) >= MAX_REASONS:
            reason = "other"
        self.bad[reason] += 1
        self.first_bad = self.first_bad or (number, text)
        if not self.good and self.bad.total() >= MAX_STRANGE_LINES:
            raise UsageError(f"no telemetry log: {self.complaint()}")


def _parts(lines: bytes) -> Iterator[bytes]:
    """Events lie between steps, and are read by themselves: a part holds nothing else, or none."""
    begin = 0
    while (found := lines.find(b'"event"', begin)) >= 0:
        event = max(begin, lines.rfind(b"\n", begin, found) + 1)
        if event > begin:
            yield lines[begin:event]
        begin = lines.find(b"\n", found) + 1 or len(lines)
        yield lines[event:begin]
    if begin < len(lines):
        yield lines[begin:]


class Replay:
    """One run of the engine over a log: its anomalies and, to ``explain``, all that led to them.

    anomalies: all of them by id, as they were last; with their end_time if they are over.
    """

    def __init__(
        self,
        kinds: DetectionConfig | None = None,
        anomalies: AnomaliesConfig | None = None,
        explain: bool = False,
    ) -> None:
        self.anomalies: dict[str, Anomaly] = {}
        self._explain = explain
        self._engine = Detection(kinds, anomalies)
        self._reader = LogReader()
        self._statuses: dict[tuple[str, str | None, int | None, str | None], DetectorStatus] = {}
        self._suppressed: dict[tuple[str, str | None, str], Suppressed] = {}

    def run(self, lines: Iterable[str | bytes], until: float | None = None) -> Iterator[Anomaly]:
        """Every anomaly as it is raised. Bad lines are left out and told in one line on stderr.

        until: a step or a time (wall clock, seconds) before which to stop, as FIRST_TIME_S says.
        Raises UsageError when ``lines`` hold no telemetry record at all.
        """
        feed = self._engine.feed
        records = self._reader.records(lines)
        if until is not None:
            records = itertools.takewhile(lambda record: not _is_reached(record, until), records)
        if self._explain:
            records = self._looked_at(records)
        for record in records:
            if changes := feed(record):
                yield from self._new(changes)
        if complaint := self._reader.complaint():
            sys.stderr.write(f"warpwatch: {complaint}\n")
        if failure := self._engine.take_failure():
            raise failure

    def _new(self, changes: Iterable[Anomaly]) -> Iterator[Anomaly]:
        for anomaly in changes:
            new = anomaly.id not in self.anomalies
            self.anomalies[anomaly.id] = anomaly
            if new:
                yield anomaly

    def statuses(self) -> list[tuple[str, DetectorStatus]]:
        """Kind and reading of all that was judged, that of ended jobs as it was at their end."""
        self._keep_readings()
        return [(key[0], reading) for key, reading in self._statuses.items()]

    def suppressed(self) -> list[Suppressed]:
        """What was found and not raised, because an active anomaly was its cause."""
        self._keep_suppressed()
        return list(self._suppressed.values())

    def _looked_at(self, records: Iterator[Record]) -> Iterator[Record]:
        """Before each of them: the engine forgets jobs that end, and suppressed findings."""
        for record in records:
            died = isinstance(record, RankEvent) and record.event == "died"
            if died or isinstance(record, End):
                self._keep_readings()
            self._keep_suppressed()
            yield record

    def _keep_readings(self) -> None:
        for kind, reading in self._engine.statuses():
            self._statuses[kind, reading.job, reading.rank, reading.device] = reading

    def _keep_suppressed(self) -> None:
        for shadow in self._engine.suppressed:
            self._suppressed[shadow.kind, shadow.job, shadow.cause_id] = shadow


def _is_reached(record: Record, until: float) -> bool:
    if until >= FIRST_TIME_S:
        return record.time >= until
    return isinstance(record, Step) and record.step >= until
