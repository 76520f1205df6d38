"""Ring files as a shim writes them, made with the protocol's codecs alone."""

import contextlib
import functools
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

from warpwatch import protocol
from warpwatch_daemon.ranks.rank import boot_id

# A fork of a small process costs a tenth of a new interpreter. All end when their parent does.
_HOLD = """
import fcntl, os, signal, sys
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
for path in sys.stdin:
    if os.fork() == 0:
        try:
            fd = os.open(path.rstrip(), os.O_RDWR)
        except OSError:
            print(0, flush=True)
            os._exit(1)
        fcntl.lockf(fd, fcntl.LOCK_EX, 1, 0)
        print(os.getpid(), flush=True)
        while True:
            signal.pause()
os.killpg(0, signal.SIGKILL)
"""


class Holder:
    """A process that holds the lock of a ring, as the training process would."""

    def __init__(self, path: Path) -> None:
        server = _holders()
        server.stdin.write(f"{path}\n")
        server.stdin.flush()
        self.pid = int(server.stdout.readline())
        assert self.pid, f"{path} cannot be opened"
        self._process = psutil.Process(self.pid)

    def kill(self) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            self._process.kill()

    def wait(self) -> None:
        """Return when the process is gone, and its lock with it."""
        self._process.wait()

    def close(self) -> None:
        self.kill()
        self.wait()


@functools.cache
def _holders() -> subprocess.Popen[str]:
    """The process of which all holders are forks."""
    return subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        text=True, start_new_session=True,
    )  # fmt: skip


class RingFile:
    """A ring on disk that a test writes as if it were a training process."""

    def __init__(
        self, folder: Path, *, wall: Callable[[], float] | None = None, **metadata: Any
    ) -> None:
        self._wall_ns = time.time_ns if wall is None else lambda: int(wall() * 1e9)
        self.holder: Holder | None = None
        said: dict[str, Any] = {
            "job": "train", "rank": 0, "world_size": 2, "phases": ["data_wait", "comm"],
        }  # fmt: skip
        said |= metadata
        self.path = folder / f"{said['job']}-r{said['rank']}-{secrets.token_hex(8)}.ring"
        self.rank: int = said["rank"]
        self.records = 0
        self.steps = 0
        self.phases_ns = [0] * protocol.MAX_PHASES
        data = bytearray(protocol.RING_SIZE)
        # Each ring is of another process, unless a test names its start.
        process = os.getpid(), boot_id(), said.pop("start", None) or secrets.randbits(32)
        times = self._wall_ns(), time.monotonic_ns()
        identity = protocol.Identity(*process, *times, protocol.RECORD_COUNT)
        data[: protocol.IDENTITY.size] = protocol.encode_identity(identity)
        metadata_bytes = protocol.encode_metadata(1, said)
        start = protocol.META_OFFSETS[0]
        data[start : start + len(metadata_bytes)] = metadata_bytes
        self.path.write_bytes(data)
        self.heartbeat()

    def put(self, offset: int, data: bytes) -> None:
        with self.path.open("r+b") as file:
            file.seek(offset)
            file.write(data)

    def word(self, index: int, value: int) -> None:
        self.put(8 * index, value.to_bytes(8, "little"))

    def heartbeat(self) -> None:
        self.word(protocol.WORD_HEARTBEAT, time.monotonic_ns())

    def record(self, kind: int, payload: bytes, flags: int = 0) -> None:
        self.records += 1
        record = protocol.encode_record(self.records, kind, flags, self._wall_ns(), payload)
        self.put(protocol.record_offset(self.records), record)
        self.word(protocol.WORD_RECORDS, self.records)

    def step(
        self,
        duration_s: float = 0.1,
        data_wait_s: float = 0.01,
        comm_s: float = 0.0,
        profiled: bool = False,
    ) -> None:
        phases = [int(data_wait_s * 1e9), int(comm_s * 1e9)]
        payload = protocol.STEP.pack(
            self.steps, int(duration_s * 1e9), protocol.ABSENT, protocol.ABSENT, 8, 0
        )
        payload += b"".join(ns.to_bytes(8, "little") for ns in phases)
        self.word(protocol.WORD_STEP_BEGUN, self.steps + 2)
        self.record(protocol.RECORD_STEP, payload, protocol.FLAG_PROFILED if profiled else 0)
        self.steps += 1
        for index, ns in enumerate(phases):
            self.phases_ns[index] += ns
        totals = protocol.encode_totals(
            self.steps, self.steps, self.steps, 8 * self.steps, 3 * self.steps, 0, self.phases_ns
        )
        self.put(protocol.TOTALS_OFFSETS[self.steps % 2], totals)

    def iteration(self, duration_s: float, prefill: int, decode: int, kv: int) -> None:
        payload = protocol.STEP.pack(
            self.steps, int(duration_s * 1e9), protocol.ABSENT, protocol.ABSENT, 0, prefill + decode
        )
        waits = int(duration_s / 4 * 1e9).to_bytes(8, "little")
        payload += protocol.WORK.pack(prefill, decode, kv) + bytes(8) + waits
        self.record(protocol.RECORD_ITERATION, payload)
        self.steps += 1

    def second(
        self, *words: int, buckets: Sequence[tuple[int, int, int]] = (), continues: bool = False
    ) -> None:
        payload = protocol.SERVE.pack(*words, *[0] * (13 - len(words)))
        payload += b"".join(protocol.BUCKET.pack(*bucket) for bucket in buckets)
        flags = protocol.FLAG_CONTINUES if continues else 0
        self.record(protocol.RECORD_SERVE, payload, flags)

    def event(self, name: str, **fields: Any) -> None:
        self.record(protocol.RECORD_EVENT, protocol.encode_event(name, fields))

    def hold(self) -> Holder:
        self.holder = Holder(self.path)
        return self.holder

    def die(self) -> None:
        if self.holder is not None:
            self.holder.close()
            self.holder = None

    def end(self) -> None:
        """Say that the process ends in order, and let it."""
        self.word(protocol.WORD_ENDED, 1)
        self.die()

    def steps_of(self, count: int, duration_s: float = 0.1) -> None:
        for _ in range(count):
            self.step(duration_s)

    def held(self) -> contextlib.closing[Holder]:
        """Let another process hold the ring's lock, as the training process would."""
        return contextlib.closing(Holder(self.path))


def whole_ring(turn: int) -> bytes:
    """The valid steps that fill a ring for the ``turn``-th time."""
    first = turn * protocol.RECORD_COUNT
    return b"".join(_step(first + n) for n in range(1, protocol.RECORD_COUNT + 1))


def _step(sequence: int) -> bytes:
    payload = protocol.STEP.pack(sequence, 10**8, 10**7, 1 << 30, 8, 8) + (10**7).to_bytes(8, "big")
    record = protocol.encode_record(sequence, protocol.RECORD_STEP, 0, time.time_ns(), payload)
    return record.ljust(protocol.RECORD_SIZE, b"\0")
