"""Reads commands, runs a capture up to its final answer, and estimates the events of a step.

The daemon bounds a capture by the events that a recorded step is expected to hold. autograd numbers
the operators that it may have to differentiate, with one counter per thread. The estimate is a
step's share of that counter times the events per operator; each capture corrects the factor.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections import deque
from collections.abc import Callable
from threading import get_native_id
from typing import Any, NamedTuple

from warpwatch import faults, protocol
from warpwatch.ring import RingWriter

_ID = re.compile(r"[0-9A-Za-z-]{1,40}")
MAX_STEPS = 100
# Additions to a trace, at a cost. Unknown options are ignored.
OPTIONS = ("stacks", "shapes", "memory")


class Command(NamedTuple):
    """A command; ``op`` is capture or cancel. Only captures use the fields after ``id``."""

    op: str
    id: str
    kind: str = ""
    start_step: int = 0
    steps: int = 0
    arm_timeout_s: float = 60.0
    options: tuple[str, ...] = ()


def parse_command(fields: dict[str, Any]) -> Command | None:
    """Return the command, None if it is invalid; ``kind`` is empty for an invalid capture."""
    identifier = fields.get("id")
    if not isinstance(identifier, str) or not _ID.fullmatch(identifier):
        return None
    if fields.get("op") == "cancel":
        return Command("cancel", identifier)
    if fields.get("op") != "capture":
        return None
    kind, start, steps = fields.get("kind"), fields.get("start_step", 0), fields.get("steps", 1)
    timeout = fields.get("arm_timeout_s", 60)
    whole = type(start) is int and type(steps) is int and 0 < steps <= MAX_STEPS
    timely = type(timeout) in (int, float) and 0 < timeout <= protocol.MAX_ARM_TIMEOUT_S
    if not (isinstance(kind, str) and whole and timely):
        return Command("capture", identifier)
    asked = fields.get("options")
    options = tuple(name for name in OPTIONS if isinstance(asked, list) and name in asked)
    return Command("capture", identifier, kind, start, steps, float(timeout), options)


def read_command(fd: int) -> tuple[bytes, Command | None] | None:
    """Return (sequence number as 8 bytes, command), or None while the file is being written."""
    data = os.pread(fd, protocol.COMMAND_SIZE, 0)
    try:
        _, fields = protocol.decode_command(data)
    except (ValueError, RecursionError):
        return None
    return data[8:16], parse_command(fields)


def open_commands(folder_fd: int, name: str, owner_uid: int) -> int:
    """Open ``commands/<name>.cmd``; return -1 unless it is a command file of ``owner_uid``."""
    nofollow = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        commands_fd = os.open("commands", nofollow | os.O_DIRECTORY, dir_fd=folder_fd)
    except OSError:
        return -1
    try:
        fd = os.open(f"{name}.cmd", nofollow | os.O_NONBLOCK, dir_fd=commands_fd)
    except OSError:
        return -1
    finally:
        os.close(commands_fd)
    status = os.fstat(fd)
    regular = status.st_mode & 0o170000 == 0o100000
    if regular and status.st_uid == owner_uid and status.st_size == protocol.COMMAND_SIZE:
        return fd
    os.close(fd)
    return -1


# A recording may take twice what is expected, and at least this long: beside many other programs
# five steps of 0.2 s took over 10 s.
MIN_RECORDING_S = 30.0
# Twice the expectation, which is that steps take twice as long while they are recorded.
_PATIENCE = 4.0


class Recorder:
    """The recorder of a kind of capture. All but ``deliver`` is called in the training thread.

    Each method may raise; ``drop`` and ``discard`` follow then. ``base`` is the path of the
    capture's files without the suffix of the kind. After ``deliver`` ``events`` is the number of
    events in the trace and ``size_bytes`` the disk space that it needed; 0 without a trace.
    """

    events = size_bytes = 0
    # Whether another thread than the one that started it may drop it.
    stops_anywhere = False

    def prepare(self) -> None:
        """Prepare in the lead-in step."""

    def start(self, number: int) -> None:
        """Start to record; step ``number``, the first, starts next."""
        raise NotImplementedError

    def next_step(self, number: int) -> None:
        """Go on after a recorded step; step ``number`` starts next."""
        raise NotImplementedError

    def stop(self, about: dict[str, Any]) -> None:
        """Stop recording. ``about`` has job, rank, world_size, first_step and last_step."""
        raise NotImplementedError

    def export(self, base: str) -> None:
        """Write or keep the recording."""

    def deliver(self, base: str, beat: Callable[[], None]) -> dict[str, Any]:
        """Make the files appear and return the fields of the answer. In the helper thread.

        Call ``beat`` at least once per second.
        """
        return {}

    def drop(self) -> None:
        """Stop recording and keep nothing."""
        raise NotImplementedError

    def discard(self, base: str) -> None:
        """Remove the files that ``export`` and ``deliver`` left unfinished."""


class RecordingSession:
    """The states are: armed, prepared (in the lead-in step), recording; ``dropped`` ends each.

    The thread that takes the claim gives the one final answer.
    """

    def __init__(
        self,
        command: Command,
        ring: RingWriter,
        inbox: str,
        recorder: Recorder,
        number: int,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """Arm before step ``number``."""
        self.command = command
        self.ring = ring
        self.recorder = recorder
        self._armed_step = number
        self.base = os.path.join(inbox, f"{command.id}.{ring.name}")
        self.first_step = command.start_step
        self.last_step = command.start_step + command.steps - 1
        self._monotonic = monotonic
        self._armed_at = monotonic()
        self.deadline = self._armed_at + command.arm_timeout_s
        self.limit_s = MIN_RECORDING_S
        self.prepared = False
        self.recording = False
        self.begun = False
        self.dropped = False
        self._operators = (0, 0)
        self._works: list[tuple[int, int, int]] = []
        self._thread = 0
        self._recording_at = 0.0
        self._claim = deque([True])

    def answer(self, event: str, **fields: Any) -> bool:
        """Give the final answer; return False if it was given before."""
        try:
            self._claim.pop()
        except IndexError:
            return False
        try:
            self.ring.event(event, id=self.command.id, **fields)
        except ValueError as error:
            # The ring was removed and is closed by now: no one reads answers there.
            faults.swallow(error)
        return True

    def fail(self, detail: str) -> None:
        """Give up; the training thread stops the recorder at its next boundary."""
        self.dropped = True
        self.answer("capture_failed", detail=detail)

    def disarm(self, detail: str) -> None:
        """Give up a capture that is not wanted any more or whose step did not come."""
        self.dropped = True
        self.answer("capture_disarmed", detail=detail)

    def enter(self) -> None:
        """Enter the lead-in step, in the thread that has to stop the recorder."""
        self._thread = get_native_id()
        self.prepared = True

    def prepare(self) -> None:
        """Prepare the recorder and limit its time. Raises what the recorder raises."""
        steps_since_armed = self.first_step - 1 - self._armed_step
        if steps_since_armed:
            step_s = (self._monotonic() - self._armed_at) / steps_since_armed
            self.limit_s = max(MIN_RECORDING_S, _PATIENCE * (self.command.steps + 1) * step_s)
        self.recorder.prepare()

    def start(self) -> None:
        """Start to record after the lead-in step."""
        self._operators = (operators() or 0, 0)
        self._recording_at = self._monotonic()
        self.recording = True
        self.recorder.start(self.first_step)

    def note_work(self, number: int, work: tuple[int, int, int] | None) -> None:
        """Keep the work of a recorded iteration."""
        if work is not None and self.recording and number >= self.first_step:
            self._works.append(work)

    def finish(self, metadata: dict[str, Any]) -> None:
        """Stop and export. ``metadata`` has job, rank and world_size."""
        self._operators = (self._operators[0], operators() or 0)
        about = {**metadata, "first_step": self.first_step, "last_step": self.last_step}
        if self._works:
            about["iterations"] = self._works
        self.recorder.stop(about)
        self.recorder.export(self.base)

    def deliver(self, beat: Callable[[], None]) -> None:
        """Deliver files and answer in the helper thread. Raises what the recorder raises."""
        fields = self.recorder.deliver(self.base, beat)
        steps = {"first_step": self.first_step, "last_step": self.last_step}
        self.answer("capture_finished", **fields, **steps)

    @property
    def operators(self) -> int:
        """The rise of autograd's counter meanwhile; 0 if unknown."""
        before, after = self._operators
        return max(0, after - before) if before else 0

    @property
    def here(self) -> bool:
        """Whether this is the thread that prepared it."""
        return self._thread == get_native_id()

    @property
    def lives(self) -> bool:
        """Whether the thread that prepared it is alive."""
        return os.path.exists(f"/proc/self/task/{self._thread}")

    def expire(self) -> None:
        """Give up if the start step or the end of the recording is late. In either thread."""
        now = self._monotonic()
        if not self.begun and now > self.deadline:
            self.disarm("start step did not begin in time")
        elif self.recording and now - self._recording_at > self.limit_s:
            self.fail(f"interrupted: the recording took longer than {self.limit_s:.0f} s")


# Events of a trace for each number of autograd's counter, before the first capture. Measured on the
# CPU with torch 2.13: 25 for a perceptron with SGD. On a GPU launches, kernels and their arrows
# come to them.
FACTOR_CPU = 25.0
FACTOR_CUDA = 40.0
# The counter is read at every 16th poll for a command, more often at the first polls.
SAMPLE_POLLS = 16


class EventBudget:
    """The expected events per step. Its counter is of the training thread, which calls it.

    ``events_per_step`` has two significant digits; None if unknown.
    """

    def __init__(self) -> None:
        self.events_per_step: int | None = None
        self._calls = self._next_sample = 0
        self._factor: float | None = None
        self._measured: float | None = None
        self._rate = 0.0
        self._last: tuple[int, int] | None = None

    def before_step(self, number: int) -> None:
        """Read the counter at some of the calls, as step ``number`` is about to start."""
        self._calls += 1
        if self._calls > self._next_sample:
            self._next_sample = self._calls + min(SAMPLE_POLLS, self._calls // 2)
            self.sample(number)

    def sample(self, number: int) -> None:
        counter = operators()
        if counter is None:
            return
        last, self._last = self._last, (number, counter)
        if last is not None and number > last[0] and counter >= last[1]:
            self._rate = (counter - last[1]) / (number - last[0])
            self._estimate()

    def learn(self, events: int, steps: int, counted: int) -> None:
        """Correct the factor by a capture of ``steps`` whose counter rose by ``counted``."""
        self._measured = events / steps
        self._factor = events / counted if counted else None
        self._estimate()

    def _estimate(self) -> None:
        uses_cuda = cuda_in_use(sys.modules.get("torch")) is not None
        factor = self._factor or (FACTOR_CUDA if uses_cuda else FACTOR_CPU)
        # Without gradients nothing is counted: what was measured holds.
        estimate = self._rate * factor or self._measured or 0.0
        self.events_per_step = int(float(f"{estimate:.1e}")) or None


def operators() -> int | None:
    """Return autograd's counter of this thread; None if torch has none."""
    autograd: Any = getattr(sys.modules.get("torch"), "autograd", None)
    counter = getattr(autograd, "_get_sequence_nr", None)
    return None if counter is None else int(counter())


def cuda_in_use(torch: Any) -> Any:
    """Return torch.cuda once the program uses a GPU, None before."""
    cuda = getattr(torch, "cuda", None)
    return cuda if cuda is not None and cuda.is_initialized() else None
