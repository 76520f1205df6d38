"""Captures by stock PyTorch's own Kineto: a window of time in a process that needs no shim."""

from __future__ import annotations

import gzip
import os
import secrets
import shutil
import stat
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from warpwatch_daemon import files
from warpwatch_daemon.captures.kineto.pollers import LEAD_S, Order, Poller, Pollers
from warpwatch_daemon.captures.session import CaptureSession, is_over
from warpwatch_daemon.captures.verification import Expectation
from warpwatch_daemon.config.triggers import TriggersConfig
from warpwatch_daemon.ranks import inbox
from warpwatch_daemon.ranks.directory import Directory
from warpwatch_telemetry.captures import CAPTURE_TIMEOUT_S, Capture, RankCapture
from warpwatch_telemetry.records import End, RankEvent

# For a process that was too late with its first request.
AGAIN_LEAD_S = 3 * LEAD_S
# What is still running when the window ends belongs to it.
WINDOW_SLACK_S = 2.0
# A process that is ready may have refused, or be done since its last poll: the file may still come.
REFUSED_GRACE_S = 3.0
# The process is gone; so long a file that it left is looked at.
GONE_GRACE_S = 1.0
# Another profiler that is still running after so long is not waited for.
BUSY_TIMEOUT_S = 5.0
REFUSED = (
    "PyTorch took the request and wrote nothing: another profiler was running, or it may not write "
    "to the inbox (torch 2.14 and newer: KINETO_ONDEMAND_TRACE_DIR); KINETO_LOG_LEVEL=1 says more"
)


class AskedProcess:
    """A process, what is ordered of it now, and the file that shall come of that."""

    def __init__(self, process: Poller, order: Order, asked_at: float) -> None:
        self.process = process
        self.gone_at: float | None = None
        self.again = False
        self.ask(order, asked_at)

    def ask(self, order: Order, asked_at: float) -> None:
        path = Path(order.config.log_file)
        name = f"{path.stem}_{self.process.pid}{path.suffix}"
        self.order = order
        self.asked_at = asked_at
        self.file = TraceFile(path.parent, name, self.process.sender.uid)


class KinetoSession(CaptureSession):
    def __init__(
        self,
        capture: Capture,
        targets: Mapping[int, AskedProcess],
        inbox_path: Path,
        pollers: Pollers,
        triggers: TriggersConfig,
    ) -> None:
        # It is a window of time.
        super().__init__(replace(capture, steps=None), targets)
        self._targets = targets
        self._inbox = inbox_path
        self._pollers = pollers
        self._triggers = triggers

    def observe(self, event: RankEvent | End, at: float) -> None:
        """Nothing: what becomes of a process shows at its socket."""

    def look(self, at: float) -> None:
        """Whether the traces have come, which waits for the inbox's disk."""
        for number, rank in list(self.ranks.items()):
            if not is_over(rank):
                self._targets[number].file.look(at)

    def advance(self, at: float) -> bool:
        for number, rank in self.ranks.items():
            if not is_over(rank):
                self.ranks[number] = self._moved(rank, at)
        if self.capture.recording_time is None:
            begun = [t.order.config.start_time for t in self._targets.values() if t.order.sent_at]
            if begun and min(begun) <= time.time():
                self.capture = replace(self.capture, recording_time=min(begun))
        return all(map(is_over, self.ranks.values()))

    def _moved(self, rank: RankCapture, at: float) -> RankCapture:
        target = self._targets[rank.rank]
        if target.file.is_complete:
            return replace(rank, state="exported")
        problem = self._problem(target, at)
        if problem == REFUSED and not target.again:
            self._ask_again(target, at)
            return RankCapture(rank.rank)
        if problem:
            state = "missing" if problem.startswith("the process") else "failed"
            return replace(rank, state=state, detail=problem)
        order = target.order
        if order.sent_at is None:
            return rank
        recording = order.config.start_time <= time.time()
        return replace(rank, state="recording" if recording else "armed")

    def _ask_again(self, target: AskedProcess, at: float) -> None:
        """Once, with more time: on a busy machine it looked too late, and the start was over."""
        target.again = True
        config = replace(
            target.order.config, log_file=log_file(self._inbox, self.capture), start_time=0.0
        )
        name = target.process.sender.name
        target.ask(self._pollers.give({name: config}, AGAIN_LEAD_S)[name], at)

    def _problem(self, target: AskedProcess, at: float) -> str:
        """Why nothing is expected of the process any more; empty while it is."""
        order, triggers = target.order, self._triggers
        if order.sent_at is None:
            waited_s = at - target.asked_at
            if not target.process.ready and waited_s >= BUSY_TIMEOUT_S:
                return f"another profiler has been running for {waited_s:.0f} s"
            if waited_s >= triggers.arm_timeout_s:
                return f"the process did not ask for anything within {waited_s:.0f} s"
        elif at - order.sent_at >= CAPTURE_TIMEOUT_S + order.config.window_s:
            return f"no trace within {at - order.sent_at:.0f} s of the request"
        elif order.refused_at is not None and at - order.refused_at >= REFUSED_GRACE_S:
            return REFUSED
        if self._pollers.is_live(target.process):
            return ""
        target.gone_at = at if target.gone_at is None else target.gone_at
        # Its file needs a last look, which may take its time.
        is_looked_at = target.file.looked_at - target.gone_at >= GONE_GRACE_S
        return "the process ended" if is_looked_at else ""

    def _withdraw(self, rank: RankCapture) -> None:
        """What was sent cannot be stopped from outside."""
        target = self._targets[rank.rank]
        self._pollers.withdraw(target.process, target.order)

    def _taken(self, rank: RankCapture, folder: Path) -> tuple[RankCapture, tuple[str, ...]]:
        if rank.state != "exported":
            return rank, ()
        name = f"rank{rank.rank}{inbox.SUFFIX['torch']}"
        self._targets[rank.rank].file.take(folder / name)
        return replace(rank, state="written", file=name), (name,)

    def expectation(self, number: int) -> Expectation | None:
        target = self._targets[number]
        return Expectation(
            # Where it is not known, the number is that of its arrival, and the trace knows better.
            rank=target.process.facts.rank,
            window_s=target.order.config.window_s + WINDOW_SLACK_S,
            on_gpu=target.process.has_gpu,
        )


def log_file(folder: Path, capture: Capture) -> str:
    """A name that no one else can have taken before."""
    return str(folder / f"{capture.id}.{secrets.token_hex(8)}.json")


# The size must stand still for so long; less than what a report of one flush takes is a guess.
STILL_S = 0.3
_TAIL_BYTES = 64
# Level 1 is five times as quick as the default and 20 % larger.
_LEVEL = 1


class TraceFile:
    """The trace that libkineto writes into the inbox, until it is whole and in the store.

    It is plain JSON, written by the process itself; the JSON's end and a size that stands still say
    that it is whole. Versions that rename it at the end and those that write in place look the
    same. ``look`` is for one thread; what it found, ``is_complete`` says to all.
    looked_at: when the newest look that has ended began, monotonic.
    """

    def __init__(self, folder: Path, name: str, owner_uid: int) -> None:
        self.name = name
        self._folder = folder
        self._owner_uid = owner_uid
        self._size = -1
        self._since = 0.0
        self.looked_at = 0.0
        self.is_complete = False

    def look(self, at: float) -> None:
        self.is_complete = self.is_complete or self._is_whole(at)
        self.looked_at = at

    def _is_whole(self, at: float) -> bool:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            fd = os.open(self._folder / self.name, flags)
        except OSError:
            return False
        try:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode) or found.st_uid != self._owner_uid:
                # Whose it is, ``take`` says.
                self._size = 0
                return True
            if found.st_size != self._size:
                self._size, self._since = found.st_size, at
                return False
            tail = os.pread(fd, _TAIL_BYTES, max(0, found.st_size - _TAIL_BYTES))
            return at - self._since >= STILL_S and tail.rstrip().endswith(b"}")
        finally:
            os.close(fd)

    def take(self, target: Path) -> None:
        """Into the store, compressed. Raises InboxError for a bad file, OSError for the store."""
        plain = target.with_name(target.name + ".plain")
        try:
            inbox.take(Directory(self._folder), self.name, self._owner_uid, plain)
            with (
                plain.open("rb") as source,
                files.replacing(target) as file,
                gzip.open(file, "wb", compresslevel=_LEVEL) as out,
            ):
                shutil.copyfileobj(source, out, 1 << 20)
        finally:
            plain.unlink(missing_ok=True)
