"""The messages between libkineto and its daemon (dynolog's "ipcfabric"), little-endian.

A datagram is a header (u64 payload size, 32 bytes type) and the payload. A process with a GPU
registers once with ``ctxt`` (i32 gpu, i32 pid, i64 job id); every process polls with ``req`` (i32
wants, i32 n, i64 job id, i32 pids[n]: itself and its ancestors) and is answered with a
configuration, mostly an empty one. While a trace is taken it does not want activities.
"""

from __future__ import annotations

import struct
from collections.abc import Collection
from dataclasses import dataclass

HEADER = struct.Struct("<Q32s")
REGISTRATION = struct.Struct("<iiq")
POLL = struct.Struct("<iiq")
ANSWER = struct.Struct("<i")
TYPE_REGISTRATION = b"ctxt"
TYPE_POLL = b"req"
WANTS_ACTIVITIES = 2
# libkineto sends itself and ten ancestors.
MAX_PIDS = 64
MAX_MESSAGE_BYTES = HEADER.size + POLL.size + 4 * MAX_PIDS
MAX_PID = 1 << 22

_OPTION_KEYS = {
    "shapes": "PROFILE_REPORT_INPUT_SHAPES",
    "stacks": "PROFILE_WITH_STACK",
    "memory": "PROFILE_PROFILE_MEMORY",
}


class MessageError(ValueError):
    """What is no message of libkineto. ``reason`` is counted."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Poll:
    """``pids``: the process as it sees itself, then its ancestors. ``ready``: nothing runs."""

    ready: bool
    job_id: int
    pids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TraceConfig:
    """What a process is asked to record. Times are wall clock in seconds.

    options: of telemetry.captures.CAPTURE_OPTIONS. libkineto appends ``_<pid>`` to the name of
    ``log_file`` and refuses, silently, a start that leaves less than the warm-up.
    """

    log_file: str
    start_time: float
    window_s: float
    warmup_s: int = 0
    options: Collection[str] = ()

    def text(self) -> str:
        lines = [
            f"PROFILE_START_TIME={round(self.start_time * 1000)}",
            f"ACTIVITIES_LOG_FILE={self.log_file}",
            f"ACTIVITIES_WARMUP_PERIOD_SECS={self.warmup_s}",
            f"ACTIVITIES_DURATION_MSECS={max(1, round(self.window_s * 1000))}",
        ]
        lines += [f"{_OPTION_KEYS[option]}=true" for option in self.options]
        return "\n".join(lines) + "\n"


def parse(data: bytes) -> Poll | None:
    """None is a registration. Raises MessageError("bad_message") for what is neither."""
    if not HEADER.size <= len(data) <= MAX_MESSAGE_BYTES:
        raise MessageError("bad_message")
    size, name = HEADER.unpack_from(data)
    payload = data[HEADER.size :]
    if size != len(payload):
        raise MessageError("bad_message")
    kind = name.split(b"\0", 1)[0]
    if kind == TYPE_REGISTRATION and size == REGISTRATION.size:
        return None
    if kind == TYPE_POLL and size >= POLL.size:
        return _poll(payload)
    raise MessageError("bad_message")


def _poll(payload: bytes) -> Poll:
    wants, count, job_id = POLL.unpack_from(payload)
    rest = payload[POLL.size :]
    if not 1 <= count <= MAX_PIDS or len(rest) != 4 * count:
        raise MessageError("bad_message")
    pids = struct.unpack(f"<{count}i", rest)
    if not all(0 <= pid <= MAX_PID for pid in pids) or pids[0] == 0:
        raise MessageError("bad_message")
    return Poll(bool(wants & WANTS_ACTIVITIES), job_id, pids)


def message(kind: bytes, payload: bytes) -> bytes:
    return HEADER.pack(len(payload), kind) + payload


def registered(count: int) -> bytes:
    """The answer to a registration: how many processes of the job there are."""
    return message(TYPE_REGISTRATION, ANSWER.pack(count))


def configuration(text: str) -> bytes:
    """The answer to a poll; an empty text is nothing to do."""
    return message(TYPE_POLL, text.encode())
