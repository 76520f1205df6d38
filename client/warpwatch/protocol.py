"""The rendezvous protocol, version 1: layouts of ring and command file, and their codecs.

Everything is little-endian. docs/protocol.md describes the same for shims in other languages.
Both sides import this file, so it depends on nothing.
"""

from __future__ import annotations

import json
import struct
import zlib
from typing import Any, NamedTuple

PROTOCOL_VERSION = 1

# --- the ring: a header, then fixed-size records ------------------------------------------------

RING_MAGIC = b"WWRING01"
HEADER_SIZE = 4096
RECORD_SIZE = 256
RECORD_COUNT = 2048
RING_SIZE = HEADER_SIZE + RECORD_SIZE * RECORD_COUNT
MAX_RING_BYTES = 1 << 20
MAX_PHASES = 16
# "Not known" in a field that could also be 0.
ABSENT = (1 << 64) - 1

# magic, header size, record size, record count, pid, boot id, process start (ticks since boot),
# created (wall ns), created (monotonic ns)
IDENTITY = struct.Struct("<8sIIII16sQQQ")

# Words that change; each is one aligned 8-byte store. Indices into the header as u64 words.
WORD_HEARTBEAT = 8  # monotonic ns
WORD_STEP_BEGUN = 9  # the step now begun on the CPU, plus 1; 0 before the first
WORD_STEP_BEGUN_AT = 10  # monotonic ns
WORD_RECORDS = 11  # records written so far; the newest has this sequence number
WORD_ENDED = 12  # 1 after an exit in order, and while training has come to its end
WORD_CALLS = 13  # backwards and optimizer steps so far, independent of the step clock; 0: unknown
WORDS = struct.Struct("<QQQQQQ")

# Two slots are written in turn, so that one is complete if the writer dies.
# Fields: sequence, steps, newest step + 1, samples, tokens, step ns, ns of each phase; then the
# CRC.
TOTALS = struct.Struct("<" + "Q" * (6 + MAX_PHASES))
TOTALS_OFFSETS = (128, 320)
CRC = struct.Struct("<I")
# sequence, length, CRC of sequence, length and text; then the text: JSON, UTF-8.
META = struct.Struct("<QII")
META_OFFSETS = (512, 2304)
META_SLOT_SIZE = 1792
META_MAX_TEXT = META_SLOT_SIZE - META.size

# sequence (from 1), type, flags, payload length, wall ns; payload; CRC of all before it.
RECORD = struct.Struct("<QHHIQ")
RECORD_MAX_PAYLOAD = RECORD_SIZE - RECORD.size - CRC.size
RECORD_STEP = 1
RECORD_PHASE = 2
RECORD_EVENT = 3
RECORD_MEMORY = 4
RECORD_GC = 5
RECORD_ITERATION = 6
RECORD_SERVE = 7
FLAG_PROFILED = 1
# Buckets of a record of type 7 that did not fit: the next record of this type has the rest.
FLAG_CONTINUES = 2

# step, duration ns, GPU ns, allocated bytes, samples, tokens; then ns of each phase by index
STEP = struct.Struct("<QQQQQQ")
PHASE = struct.Struct("<Q")
# allocated, reserved, peak allocated (bytes), allocation retries, out-of-memory errors, bytes of
# free pieces of blocks that are partly in use
MEMORY = struct.Struct("<QQQQQQ")
# of Python's garbage collector since the process began: ns, collections; the longest since the
# record before, ns
GC = struct.Struct("<QQQ")

# An iteration of a server is a step with its work before the phases: prompt tokens computed,
# requests decoded, tokens in the KV cache of all its requests.
WORK = struct.Struct("<QQQ")
# About one second of a server, since the record before: ns, idle ns. Requests running and waiting
# now; use of the KV cache in 1e-9. Preemptions, tokens found in the prefix cache and tokens looked
# up, prompt tokens, generated tokens. Sums in ns of the latencies in LATENCIES. Then its buckets.
SERVE = struct.Struct("<QQQQQQQQQQQQQ")
SERVE_COUNTS = (
    "preemptions", "prefix_hit_tokens", "prefix_query_tokens", "prompt_tokens", "generated_tokens",
)  # fmt: skip
# The latency by its place in LATENCIES, the bucket, the number of observations.
BUCKET = struct.Struct("<BBI")
LATENCIES = ("first_token", "inter_token", "queue")
MAX_BUCKETS = (RECORD_MAX_PAYLOAD - SERVE.size) // BUCKET.size


def _latency_bounds() -> tuple[float, ...]:
    bounds = [0.001]
    while bounds[-1] < 100.0:
        bounds.append(float(f"{bounds[-1] * (1.1 if bounds[-1] < 0.1 else 1.5):.3g}"))
    return tuple(bounds)


# Upper bounds of the buckets in seconds; one more bucket counts the rest.
LATENCY_BOUNDS_S = _latency_bounds()

# --- the command file ---------------------------------------------------------------------------

COMMAND_MAGIC = b"WWCMD001"
COMMAND_SIZE = 4096
# magic, sequence, length, CRC of sequence and text; then the text: JSON, UTF-8.
COMMAND = struct.Struct("<8sQII")
COMMAND_SEQUENCE_OFFSET = 8
COMMAND_MAX_TEXT = COMMAND_SIZE - COMMAND.size
# A command with a longer timeout is invalid.
MAX_ARM_TIMEOUT_S = 3600


class ProtocolError(ValueError):
    """Bytes that are not what the protocol says. ``reason`` is a short closed-set word."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


class Identity(NamedTuple):
    pid: int
    boot_id: bytes
    process_start: int
    created_wall_ns: int
    created_monotonic_ns: int
    record_count: int

    @property
    def process(self) -> tuple[int, bytes, int]:
        """Identify the process among all of the node."""
        return self[:3]


class RingTotals(NamedTuple):
    sequence: int
    steps: int
    newest_step: int | None
    samples: int
    tokens: int
    duration_ns: int
    phases_ns: tuple[int, ...]


class Header(NamedTuple):
    """A ring's header at one time. Until the first write ``metadata_text`` is ``None``."""

    identity: Identity
    heartbeat_ns: int
    step_begun: int | None
    step_begun_ns: int
    records: int
    ended: bool
    calls: int
    totals: RingTotals
    metadata_sequence: int
    metadata_text: bytes | None


class RecordHead(NamedTuple):
    sequence: int
    type: int
    flags: int
    wall_ns: int
    payload: bytes


def encode_identity(identity: Identity) -> bytes:
    *fields, record_count = identity
    return IDENTITY.pack(RING_MAGIC, HEADER_SIZE, RECORD_SIZE, record_count, *fields)


def encode_totals(
    sequence: int, steps: int, newest: int, samples: int, tokens: int, ns: int, phases: list[int]
) -> bytes:
    """Encode totals. newest: the newest step plus 1 (0: none); phases: MAX_PHASES entries."""
    body = TOTALS.pack(sequence, steps, newest, samples, tokens, ns, *phases)
    return body + CRC.pack(zlib.crc32(body))


def encode_metadata(sequence: int, metadata: dict[str, Any]) -> bytes:
    """Return one metadata slot. Raises ProtocolError("metadata_size") when it does not fit."""
    text = json.dumps(metadata, separators=(",", ":")).encode()
    if len(text) > META_MAX_TEXT:
        raise ProtocolError(
            "metadata_size", f"metadata of {len(text)} bytes, at most {META_MAX_TEXT}"
        )
    crc = zlib.crc32(text, zlib.crc32(struct.pack("<QI", sequence, len(text))))
    return META.pack(sequence, len(text), crc) + text


def decode_header(data: bytes, size: int) -> Header:
    """Return the header in the first HEADER_SIZE bytes of a ring of ``size`` bytes.

    Raises ProtocolError with reason wrong_size, bad_magic or bad_header.
    """
    if len(data) < HEADER_SIZE:
        raise ProtocolError("wrong_size", f"{len(data)} bytes are not a header")
    magic, header_size, record_size, count, *rest = IDENTITY.unpack_from(data)
    if magic != RING_MAGIC:
        raise ProtocolError("bad_magic", "not a ring of protocol version 1")
    if header_size != HEADER_SIZE or record_size != RECORD_SIZE or not 0 < count <= 1 << 16:
        raise ProtocolError("bad_header", f"sizes {header_size}, {record_size}, {count}")
    if size != HEADER_SIZE + RECORD_SIZE * count or size > MAX_RING_BYTES:
        raise ProtocolError("wrong_size", f"{size} bytes for {count} records")
    heartbeat, begun, begun_ns, records, ended, calls = WORDS.unpack_from(data, 8 * WORD_HEARTBEAT)
    sequence, text = _newest_metadata(data)
    return Header(
        identity=Identity(rest[0], rest[1], rest[2], rest[3], rest[4], count),
        heartbeat_ns=heartbeat,
        step_begun=begun - 1 if begun else None,
        step_begun_ns=begun_ns,
        records=records,
        ended=ended == 1,
        calls=calls,
        totals=_newest_totals(data),
        metadata_sequence=sequence,
        metadata_text=text,
    )


def _newest_totals(data: bytes) -> RingTotals:
    best: tuple[int, ...] = (0,) * (6 + MAX_PHASES)
    for offset in TOTALS_OFFSETS:
        end = offset + TOTALS.size
        if zlib.crc32(data[offset:end]) == CRC.unpack_from(data, end)[0]:
            best = max(best, TOTALS.unpack_from(data, offset))
    newest = best[2] - 1 if best[2] else None
    return RingTotals(best[0], best[1], newest, best[3], best[4], best[5], best[6:])


def _newest_metadata(data: bytes) -> tuple[int, bytes | None]:
    best: tuple[int, bytes | None] = (0, None)
    for offset in META_OFFSETS:
        sequence, length, crc = META.unpack_from(data, offset)
        if sequence <= best[0] or length > META_MAX_TEXT:
            continue
        text = data[offset + META.size : offset + META.size + length]
        if zlib.crc32(text, zlib.crc32(struct.pack("<QI", sequence, length))) == crc:
            best = (sequence, text)
    return best


def record_offset(sequence: int, record_count: int = RECORD_COUNT) -> int:
    """Return the offset of the record with this sequence number (from 1)."""
    return HEADER_SIZE + RECORD_SIZE * ((sequence - 1) % record_count)


def encode_record(sequence: int, kind: int, flags: int, wall_ns: int, payload: bytes) -> bytes:
    body = RECORD.pack(sequence, kind, flags, len(payload), wall_ns) + payload
    return body + CRC.pack(zlib.crc32(body))


def decode_record(data: bytes) -> RecordHead:
    """Return one record of RECORD_SIZE bytes. Raises ProtocolError("bad_record") if it is torn."""
    sequence, kind, flags, length, wall_ns = RECORD.unpack_from(data)
    end = RECORD.size + length
    if length > RECORD_MAX_PAYLOAD or zlib.crc32(data[:end]) != CRC.unpack_from(data, end)[0]:
        raise ProtocolError("bad_record", f"record {sequence} has a wrong checksum")
    return RecordHead(sequence, kind, flags, wall_ns, data[RECORD.size : end])


def encode_event(event: str, fields: dict[str, Any]) -> bytes:
    """Return an event's payload; only a ``detail`` text that is too long is cut."""
    fields = {"event": event, **fields}
    text = json.dumps(fields, separators=(",", ":")).encode()
    while len(text) > RECORD_MAX_PAYLOAD and fields.get("detail"):
        # ASCII-escaped JSON: one character can take up to 12 bytes, so cut and look again.
        excess = len(text) - RECORD_MAX_PAYLOAD
        fields["detail"] = fields["detail"][: -max(1, excess // 12)]
        text = json.dumps(fields, separators=(",", ":")).encode()
    return text[:RECORD_MAX_PAYLOAD]


def encode_command(sequence: int, command: dict[str, Any]) -> bytes:
    """Return a whole command file. Raises ProtocolError("command_size") when it does not fit."""
    text = json.dumps(command, separators=(",", ":")).encode()
    if len(text) > COMMAND_MAX_TEXT:
        raise ProtocolError("command_size", f"command of {len(text)} bytes")
    crc = zlib.crc32(text, zlib.crc32(struct.pack("<Q", sequence)))
    return (COMMAND.pack(COMMAND_MAGIC, sequence, len(text), crc) + text).ljust(COMMAND_SIZE, b"\0")


def decode_command(data: bytes) -> tuple[int, dict[str, Any]]:
    """Return (sequence, command). Raises ProtocolError if it is torn or not a command file."""
    if len(data) != COMMAND_SIZE or data[:8] != COMMAND_MAGIC:
        raise ProtocolError("bad_magic", "not a command file of protocol version 1")
    _, sequence, length, crc = COMMAND.unpack_from(data)
    text = data[COMMAND.size : COMMAND.size + min(length, COMMAND_MAX_TEXT)]
    if zlib.crc32(text, zlib.crc32(struct.pack("<Q", sequence))) != crc:
        raise ProtocolError("bad_command", "the checksum is wrong")
    command = json.loads(text) if text else {}
    if not isinstance(command, dict):
        raise ProtocolError("bad_command", "the command is not an object")
    return sequence, command
