"""Telemetry logs as they lie on disks: packed, half-written, with lines that are no record."""

from __future__ import annotations

import contextlib
import gzip
import io
import itertools
import json
import os
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import cast

from warpwatch_telemetry.errors import UsageError
from warpwatch_telemetry.log import Decoder
from warpwatch_telemetry.records import Record

# Lines without a single record after which a file is no telemetry log.
MAX_STRANGE_LINES = 100
MAX_REASONS = 20
_GZIP_MAGIC = b"\x1f\x8b"
BLOCK_SIZE = 1 << 16
# What a line that is no record may raise.
_UNREADABLE = (ValueError, RecursionError, OverflowError)


def read_lines(
    path: Path, moved: Callable[[int, int], None] = lambda at, size: None
) -> Iterator[bytes]:
    """The log at ``path``, of standard input for ``-``, unpacked if it is gzip: whole lines, many
    at a time, but of a log that is still being written as soon as they are there.

    Only the last line may lack its end. ``moved`` hears how many bytes of how many of a file were
    read. Raises UsageError when the log cannot be read.
    """
    try:
        if str(path) == "-":
            yield from _whole_lines(_unpacked(cast(io.BufferedReader, sys.stdin.buffer)))
        else:
            with path.open("rb") as plain:
                size = os.fstat(plain.fileno()).st_size if plain.seekable() else 0
                for lines in _whole_lines(_unpacked(plain)):
                    yield lines
                    if size:
                        moved(plain.tell(), size)
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
