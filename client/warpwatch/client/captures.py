"""Captures of kind torch: torch.profiler, started and stopped at step borders.

The training thread starts, stops and exports (all of it holds the GIL anyway, and a profiler
stopped by another thread loses its trace); the helper thread compresses, hands over and keeps the
deadlines. Whoever takes a session's ``claim`` gives its final answer: there is exactly one.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from threading import get_ident
from typing import TYPE_CHECKING, Any, Protocol

from warpwatch.client import commands, faults, inbox
from warpwatch.client.commands import Command
from warpwatch.client.protocol import FLAG_PROFILED

if TYPE_CHECKING:
    from warpwatch.client.ring import RingWriter

# Reads of a command file whose checksum is wrong before its sequence number is given up.
MAX_TORN_READS = 100


class Clock(Protocol):
    """The step clock as captures see it: flags of the records, and whether it calls here."""

    flags: int
    capturing: bool
    thread: int


class Session:
    """One capture in this process, from its command to its answer."""

    def __init__(self, command: Command, ring: RingWriter) -> None:
        self.command = command
        self.ring = ring
        self.last_step = command.start_step + command.steps - 1
        self.deadline = time.monotonic() + command.arm_timeout_s
        self.profiler: Any = None
        self.begun = False
        self.dropped = False
        self.folder = ""
        self._claim = deque([True])

    def answer(self, event: str, **fields: Any) -> bool:
        """The final answer; False if it was given before."""
        try:
            self._claim.pop()
        except IndexError:
            return False
        self.ring.event(event, id=self.command.id, **fields)
        return True

    def disarm(self, detail: str) -> None:
        """Give up; a running profiler is stopped by the training thread when it comes by."""
        self.dropped = True
        self.answer("capture_disarmed", detail=detail)

    @property
    def overdue(self) -> bool:
        return not self.begun and not self.dropped and time.monotonic() > self.deadline


class TorchCaptures:
    """Follows commands at step borders. ``exported`` takes sessions to the helper thread.

    inbox: the folder for capture files; inbox_problem: why it cannot be used, as the helper found.
    metadata: what goes into the trace beside it: job, rank, world_size.
    """

    def __init__(self) -> None:
        self.session: Session | None = None
        self.exported: SimpleQueue[Session] = SimpleQueue()
        self.exporting = 0
        self.inbox = ""
        self.inbox_problem: str | None = "no_inbox"
        self.metadata: dict[str, Any] = {}
        self._torn_reads = 0

    # --- in the training thread -----------------------------------------------------------------

    def read_command(self, clock: Clock, ring: RingWriter, number: int) -> None:
        """The command file changed; step ``number`` is the next to begin."""
        found = commands.read(ring.command_fd)
        if found is None:
            self._torn_reads += 1
            if self._torn_reads >= MAX_TORN_READS:
                ring.command_seen = os.pread(ring.command_fd, 8, 8)
                self._torn_reads = 0
            return
        self._torn_reads = 0
        ring.command_seen, command = found
        if command is not None:
            self._obey(clock, ring, command, number)

    def step_begins(self, clock: Clock, number: int) -> None:
        session = self.session
        if session is None:
            return
        if session.dropped or session.overdue:
            session.disarm("start step did not begin in time")
            self._drop(clock, session)
        elif number == session.command.start_step - 1 and session.profiler is None:
            self._start(clock, session)
        elif number == session.command.start_step:
            session.begun = True

    def step_ended(self, clock: Clock, number: int) -> None:
        session = self.session
        if session is None or session.profiler is None:
            # The step that paid for stop and export, if there was one, is over now.
            clock.flags = 0
            clock.capturing = session is not None
        elif session.dropped:
            self._drop(clock, session)
        elif number >= session.last_step:
            self._finish(session)
        else:
            session.profiler.step()

    def exit(self, clock: Clock) -> None:
        """The process exits: a profiler that still runs then can crash the interpreter's end."""
        session = self.session
        if session is not None:
            session.answer("capture_failed", detail="the process exits")
            if get_ident() == clock.thread:
                self._drop(clock, session)

    def _obey(self, clock: Clock, ring: RingWriter, command: Command, number: int) -> None:
        session = self.session
        if session is not None and (command.op == "cancel" or command.id != session.command.id):
            if command.op == "cancel" and command.id != session.command.id:
                return
            session.disarm(
                "cancelled" if command.op == "cancel" else "another capture was asked for"
            )
            self._drop(clock, session)
        if command.op == "cancel" or command.kind == "stacks":
            return
        if session is not None and command.id == session.command.id:
            return
        refusal = self._refusal(command)
        if refusal:
            ring.event("capture_failed", id=command.id, detail=refusal)
        elif number > command.start_step - 1:
            ring.event("capture_late", id=command.id, step=number)
        else:
            self.session = Session(command, ring)
            clock.capturing = True
            ring.event("capture_armed", id=command.id, step=command.start_step)

    def _refusal(self, command: Command) -> str | None:
        torch = sys.modules.get("torch")
        if command.kind != "torch":
            return "unknown_kind" if command.kind else "bad_command"
        if torch is None or not hasattr(torch, "autograd"):
            return "no_torch"
        if os.environ.get("WARPWATCH_CAPTURES") == "0":
            return "disabled"
        if _profiler_runs():
            return "profiler_busy"
        return self.inbox_problem

    def _start(self, clock: Clock, session: Session) -> None:
        try:
            if _profiler_runs():
                raise RuntimeError("profiler_busy")
            session.profiler = _new_profiler(session.command.start_step, session.last_step)
            with _inductor_left_alone():
                session.profiler.start()
        except Exception as error:
            self._fail(clock, session, error)
            return
        clock.flags = FLAG_PROFILED
        session.ring.event(
            "capture_started", id=session.command.id, step=session.command.start_step
        )

    def _finish(self, session: Session) -> None:
        """Stop and export; the next step pays for it and is marked like the profiled ones."""
        command = session.command
        self.session = None
        try:
            about = {
                **self.metadata,
                "first_step": command.start_step,
                "last_step": session.last_step,
            }
            session.profiler.add_metadata_json("warpwatch", json.dumps(about))
            session.profiler.stop()
            session.folder = os.path.join(self.inbox, f"{command.id}.{session.ring.name}.tmp")
            # Kineto creates files by name with the user's umask: nobody else may enter there.
            os.mkdir(session.folder, 0o700)
            session.profiler.export_chrome_trace(os.path.join(session.folder, "trace.json"))
            self.exporting += 1
            self.exported.put(session)
        except Exception as error:
            self._report(session, error)
        session.profiler = None
        gc.collect()

    def _drop(self, clock: Clock, session: Session) -> None:
        self.session = None
        if session.profiler is not None:
            try:
                session.profiler.stop()
            except Exception as error:
                faults.swallow(error)
            session.profiler = None
            gc.collect()
        else:
            self._rest(clock)

    def _fail(self, clock: Clock, session: Session, error: Exception) -> None:
        session.profiler = self.session = None
        self._rest(clock)
        self._report(session, error)

    def _rest(self, clock: Clock) -> None:
        clock.flags = 0
        clock.capturing = False

    def _report(self, session: Session, error: Exception) -> None:
        faults.swallow(error)
        shutil.rmtree(session.folder, ignore_errors=True)
        session.answer("capture_failed", detail=f"{type(error).__name__}: {error}"[:100])

    # --- in the helper thread -------------------------------------------------------------------

    def keep_deadline(self) -> None:
        session = self.session
        if session is not None and session.overdue:
            session.disarm("start step did not begin in time")

    def cancel(self, identifier: str) -> None:
        """A cancel that the training thread may not come by to read."""
        session = self.session
        if session is not None and session.command.id == identifier:
            session.disarm("cancelled")

    def hand_over(self, session: Session, between: Any) -> None:
        """Compress the exported trace and make it appear in the inbox."""
        command = session.command
        name = f"{command.id}.{session.ring.name}.pt.trace.json.gz"
        source = os.path.join(session.folder, "trace.json")
        try:
            inbox.hand_over(
                os.path.join(self.inbox, name), lambda fd: inbox.write_gzip(source, fd, between)
            )
            session.answer(
                "capture_finished",
                file=name,
                first_step=command.start_step,
                last_step=session.last_step,
            )
        except Exception as error:
            self._report(session, error)
        finally:
            shutil.rmtree(session.folder, ignore_errors=True)
            self.exporting -= 1


@contextmanager
def _inductor_left_alone() -> Iterator[None]:
    """Keep the start of the profiler from importing torch._inductor: a second and 70 MiB.

    The profiler asks it for its CUDA graphs; a program that has not loaded it has none there.
    """
    lazy: set[str] = getattr(sys.modules["torch"], "_lazy_modules", set())
    if "_inductor" not in lazy or "torch._inductor" in sys.modules:
        yield
        return
    lazy.discard("_inductor")
    try:
        yield
    finally:
        lazy.add("_inductor")


def _profiler_runs() -> bool:
    """The program profiles itself: there is one profiler a process, and it was there first."""
    enabled = getattr(sys.modules["torch"].autograd, "_profiler_enabled", None)
    return enabled is not None and bool(enabled())


def _new_profiler(first_step: int, last_step: int) -> Any:
    """A profiler that counts the job's own steps, ready to start in the lead-in step."""
    import torch
    from torch.profiler import ProfilerAction, ProfilerActivity, profile

    def schedule(step: int) -> Any:
        if first_step <= step <= last_step:
            last = step == last_step
            return ProfilerAction.RECORD_AND_SAVE if last else ProfilerAction.RECORD
        return ProfilerAction.WARMUP if step == first_step - 1 else ProfilerAction.NONE

    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_initialized():
        activities.append(ProfilerActivity.CUDA)
    profiler = profile(activities=activities, schedule=schedule)
    profiler.step_num = first_step - 1
    profiler.current_action = ProfilerAction.WARMUP
    if hasattr(profiler, "_prev_schedule_action"):
        profiler._prev_schedule_action = ProfilerAction.WARMUP
    return profiler
