"""The telemetry log: every record as one JSON line, for ``warpwatch replay`` and other readers."""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Iterable
from pathlib import Path

from warpwatch_telemetry.log import decode, encode_line
from warpwatch_telemetry.records import Record

# The part of an existing log's end that is read to find its last records.
TAIL_BYTES = 256 * 1024

_Rank = tuple[str, int]


class JsonlWriter:
    """Appends records to the log at ``path``; what is written is in the file at once.

    A daemon that was killed may have written records that it had not yet ticked off. The newest
    time of each rank in the log's last TAIL_BYTES is remembered, and records of that rank up to it
    are skipped. A half-written last line is ended, so that the next record begins its own.

    Raises OSError when the log cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        self._fd = os.open(path, flags, 0o644)
        self._regular = stat.S_ISREG(os.fstat(self._fd).st_mode)
        self._newest: dict[_Rank, float] = {}
        try:
            self._resume()
        except OSError:
            self.close()
            raise

    def write(self, records: Iterable[Record]) -> int:
        """Append records; returns how many were new. A record that is not valid JSON is left out.

        Raises OSError (e.g. ENOSPC); whole lines that fitted stay, half of a line does not.
        """
        lines = [line for record in records if (line := self._line(record))]
        if lines:
            self._append(b"".join(lines))
        return len(lines)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _line(self, record: Record) -> bytes | None:
        rank = _rank_of(record)
        if rank is not None and record.time <= self._newest.get(rank, float("-inf")):
            return None
        return encode_line(record)

    def _append(self, data: bytes) -> None:
        written = os.write(self._fd, data)
        if written == len(data):
            return
        if self._regular:
            half = written - (data.rfind(b"\n", 0, written) + 1)
            os.ftruncate(self._fd, os.fstat(self._fd).st_size - half)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _resume(self) -> None:
        size = os.fstat(self._fd).st_size if self._regular else 0
        if not size:
            return
        start = max(0, size - TAIL_BYTES)
        tail = os.pread(self._fd, size - start, start)
        lines = tail.split(b"\n")
        # Neither a line without its beginning nor a half-written last one is a record.
        for line in lines:
            self._remember(line)
        if lines[-1]:
            self._append(b"\n")

    def _remember(self, line: bytes) -> None:
        try:
            record = decode(json.loads(line))
        except (ValueError, RecursionError):
            return
        rank = _rank_of(record)
        if rank is not None:
            self._newest[rank] = max(record.time, self._newest.get(rank, record.time))


def _rank_of(record: Record) -> _Rank | None:
    job, rank = getattr(record, "job", None), getattr(record, "rank", None)
    return None if job is None or rank is None else (job, rank)
