"""Reading one ring with ``pread``: a file that shrinks under us is a short read, never a SIGBUS."""

from __future__ import annotations

import os
import weakref
from dataclasses import dataclass

from warpwatch import protocol, rendezvous


@dataclass(frozen=True, slots=True)
class RingNews:
    """What a ring held since the last look.

    lost: records overwritten or torn before it. holder_pid: None when its process is gone.
    """

    header: protocol.Header
    records: tuple[protocol.RecordHead, ...]
    lost: int
    holder_pid: int | None


class RingReader:
    """``position``: the sequence number of the last record that was read.

    The descriptor is closed by ``close`` or with the reader.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._close = weakref.finalize(self, os.close, fd)
        self.position = 0
        self._seen: tuple[int | None, protocol.Header] | None = None

    def close(self) -> None:
        self._close()

    def header(self) -> protocol.Header:
        """Raises ProtocolError when the file no longer is a ring."""
        size = os.fstat(self._fd).st_size
        return protocol.decode_header(os.pread(self._fd, protocol.HEADER_SIZE, 0), size)

    def holder_pid(self) -> int | None:
        """The ring's process as the kernel says, 0 in another PID namespace, None: it is gone."""
        return rendezvous.lock_holder(self._fd)

    def step_begun(self) -> int | None:
        """The step that the process has begun, read now."""
        data = os.pread(self._fd, 8, 8 * protocol.WORD_STEP_BEGUN)
        begun = int.from_bytes(data, "little")
        return begun - 1 if begun else None

    def look(self) -> int:
        """Look at the header; how many records there are for ``read`` to read."""
        # Asked before reading: what a process wrote before it died is then read for certain.
        holder_pid = self.holder_pid()
        try:
            header = self.header()
        except protocol.ProtocolError:
            # ``read`` looks again and raises it.
            self._seen = None
            return 0
        self._seen = (holder_pid, header)
        return min(max(0, header.records - self.position), header.identity.record_count)

    def read(self, limit: int) -> RingNews:
        """What ``look`` saw: at most the ``limit`` newest records; those before count as lost."""
        holder_pid, header = self._seen or (self.holder_pid(), self.header())
        self._seen = None
        if header.records < self.position:
            raise protocol.ProtocolError("bad_header", "the record count went backwards")
        oldest = max(self.position, header.records - min(limit, header.identity.record_count))
        lost = oldest - self.position
        records: list[protocol.RecordHead] = []
        expected = oldest
        for data in self._chunks(oldest, header):
            for offset in range(0, len(data) - protocol.RECORD_SIZE + 1, protocol.RECORD_SIZE):
                expected += 1
                record = _decode(data[offset : offset + protocol.RECORD_SIZE])
                if record is not None and record.sequence == expected:
                    records.append(record)
        lost += header.records - oldest - len(records)
        self.position = header.records
        return RingNews(header, tuple(records), lost, holder_pid)

    def _chunks(self, oldest: int, header: protocol.Header) -> list[bytes]:
        """The bytes of the records after ``oldest``: one piece, or two where the ring wraps."""
        count = header.identity.record_count
        wanted = header.records - oldest
        if not wanted:
            return []
        first = min(wanted, count - oldest % count)
        pieces = [(oldest + 1, first)]
        if wanted > first:
            pieces.append((oldest + 1 + first, wanted - first))
        return [
            os.pread(self._fd, n * protocol.RECORD_SIZE, protocol.record_offset(sequence, count))
            for sequence, n in pieces
        ]


def _decode(data: bytes) -> protocol.RecordHead | None:
    try:
        return protocol.decode_record(data)
    except protocol.ProtocolError:
        return None
