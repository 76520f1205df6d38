"""Rings, as the daemon's source of ranks finds, follows and removes them."""

import json
import struct
import zlib
from pathlib import Path
from typing import Any

from tests.daemon.ranks.ring_files import RingFile
from tests.fuzz.watch import Target
from warpwatch import protocol
from warpwatch_daemon.ranks.counts import Positions
from warpwatch_daemon.ranks.folder import RendezvousFolder
from warpwatch_daemon.ranks.source import RING_AFTER_END_S, RanksSource
from warpwatch_telemetry import log
from warpwatch_telemetry.records import Record

RECORDS = 12
RING_BYTES = protocol.HEADER_SIZE + RECORDS * protocol.RECORD_SIZE
WORDS_AT, WORDS_SIZE = 8 * protocol.WORD_HEARTBEAT, protocol.WORDS.size
# The first byte of an input: what is made right in the ring, so that the reader goes on.
SIZES, TOTALS, METADATA, RECORD_SUMS = 1, 2, 4, 8
_SUM = struct.Struct("<I")
# The source counts seconds, and forgets a ring so long after its end.
SILENT_S = 40.0
# Wall clock, of second 0.
BEGUN = 1.79e9
# The daemon writes positions from another thread; here one input in so many does.
WRITE_EACH = 64


class Rings:
    def __init__(self, folder: Path) -> None:
        self._folder = RendezvousFolder(folder / "run", folder / "inbox", "0.0.0")
        self._positions = Positions(folder, wake=lambda: None)
        self._source = RanksSource(self._folder, self._positions, 10.0, lambda reason: None, 0)
        self._number = 0
        self._at = 0.0

    def run(self, data: bytes) -> None:
        """The ring at a first look, and with other words in its header at a second."""
        right, words, ring = data[:1] or b"\0", data[1 : 1 + WORDS_SIZE], data[1 + WORDS_SIZE :]
        self._number += 1
        path = self._folder.ranks / f"fuzz-r0-{self._number:016x}.ring"
        content = make_right(ring, right[0])
        path.write_bytes(content)
        try:
            self._poll(RING_AFTER_END_S)
            path.write_bytes(content[:WORDS_AT] + words + content[WORDS_AT + len(words) :])
            self._poll(2.0)
        finally:
            self._poll(SILENT_S)
            path.unlink(missing_ok=True)
            if self._number % WRITE_EACH == 0:
                self._positions.write()

    def _poll(self, later_s: float) -> None:
        self._at += later_s
        for record in self._source.poll(BEGUN + self._at, self._at):
            check_record(record)
        states = self._source.states(self._at)
        # A server's rank has no successor, and may be found dead with the next ring.
        assert len(states) <= 2, "a rank outlives its ring"
        for state in states:
            assert "\n" not in state.job + state.host + state.framework


def check_record(record: Record) -> None:
    """Check that the telemetry log can hold a record and return it."""
    text = json.dumps(log.encode(record), allow_nan=False)
    assert type(log.decode(json.loads(text))) is type(record), text


def make_right(ring: bytes | bytearray, right: int) -> bytes:
    data = bytearray(ring)
    if right & SIZES:
        data[RING_BYTES:] = b""
        data.extend(bytes(RING_BYTES - len(data)))
        sizes = (protocol.RING_MAGIC, protocol.HEADER_SIZE, protocol.RECORD_SIZE, RECORDS)
        struct.pack_into("<8sIII", data, 0, *sizes)
    if len(data) < protocol.HEADER_SIZE:
        return bytes(data)
    for offset in protocol.TOTALS_OFFSETS if right & TOTALS else ():
        end = offset + protocol.TOTALS.size
        _SUM.pack_into(data, end, zlib.crc32(data[offset:end]))
    for offset in protocol.META_OFFSETS if right & METADATA else ():
        sequence, length, _ = protocol.META.unpack_from(data, offset)
        length %= protocol.META_MAX_TEXT + 1
        text = data[offset + protocol.META.size :][:length]
        crc = zlib.crc32(text, zlib.crc32(struct.pack("<QI", sequence, length)))
        protocol.META.pack_into(data, offset, sequence, length, crc)
    last = len(data) - protocol.RECORD_SIZE + 1 if right & RECORD_SUMS else 0
    for number, offset in enumerate(range(protocol.HEADER_SIZE, last, protocol.RECORD_SIZE), 1):
        _, kind, flags, length, wall_ns = protocol.RECORD.unpack_from(data, offset)
        length %= protocol.RECORD_MAX_PAYLOAD + 1
        protocol.RECORD.pack_into(data, offset, number, kind, flags, length, wall_ns)
        end = offset + protocol.RECORD.size + length
        _SUM.pack_into(data, end, zlib.crc32(data[offset:end]))
    return bytes(data)


def whole_ring(folder: Path, **said: Any) -> bytes:
    """With a record of every type."""
    ring = RingFile(folder, **said)
    ring.step()
    ring.record(protocol.RECORD_PHASE, protocol.PHASE.pack(2) + b"eval")
    ring.record(protocol.RECORD_MEMORY, protocol.MEMORY.pack(1, 2, 3, 4, 5, 6))
    ring.record(protocol.RECORD_GC, protocol.GC.pack(10**7, 3, 10**6))
    ring.iteration(0.1, prefill=100, decode=3, kv=2000)
    ring.second(10**9, 0, 3, 1, 500_000, 2, buckets=[(0, 3, 2)], continues=True)
    ring.second(10**9, 10**8, 3, 1, 500_000, 2, buckets=[(1, 4, 2), (2, 5, 1)])
    ring.event("gc_pause", duration_s=0.1, generation=2, step=3)
    ring.event("capture_started", id="a", step=4)
    ring.event("exception", exception="ValueError", detail="x")
    data = bytearray(ring.path.read_bytes())
    # A process of another boot: its heartbeat alone says that it lives.
    struct.pack_into("<16s", data, 24, b"")
    return make_right(data, SIZES)


def target(folder: Path) -> Target:
    rings = [
        whole_ring(folder), whole_ring(folder, device="GPU-1", rank=1, step_clock="lightning"),
        whole_ring(folder, kind="serve"),
    ]  # fmt: skip
    later = protocol.WORDS.pack(6, 6, 6, 9, 1, 6)
    seeds = [bytes([right]) + later + ring for right in (0, 15) for ring in rings]
    tokens = (b'"job"', b'"rank"', b'"phases"', b'"event"', b"null", b"1e999", b"[[", b"\\ud800")
    return Target(Rings(folder).run, seeds, (*tokens, b"\xff" * 8), 1 + WORDS_SIZE + RING_BYTES)
