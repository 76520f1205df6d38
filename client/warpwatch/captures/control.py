"""Follows commands at step borders and keeps the one session of the process.

The training thread starts, stops and exports; the helper thread delivers what was exported and
keeps the deadlines. An error in a recorder ends its session, never the program.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from threading import get_ident
from typing import Any, Protocol

from warpwatch import faults, rendezvous
from warpwatch.captures import profilers, safety
from warpwatch.captures.profilers import NsysRecorder, TorchRecorder
from warpwatch.captures.recording import (
    Command,
    EventBudget,
    Recorder,
    RecordingSession,
    cuda_in_use,
    read_command,
)
from warpwatch.protocol import FLAG_PROFILED
from warpwatch.ring import RingWriter

# Reads of a command file whose checksum is wrong before its sequence number is given up.
MAX_TORN_READS = 100
# A profiler that the program starts in another thread waits this long for ours to end: the training
# thread ends it at the next step boundary.
GIVE_WAY_S = 30.0


class CaptureClock(Protocol):
    """The step clock as captures see it: flags of the records, and whether it calls here.

    work: the work of the iteration that ends, as in protocol.WORK.
    """

    flags: int
    push: Callable[[Any], None]
    capturing: bool
    thread: int
    work: tuple[int, int, int] | None


class Captures:
    """The captures of the process. ``exported`` passes sessions to the helper thread.

    inbox: the folder for capture files; inbox_problem: why it cannot be used, as the helper found.
    metadata: what goes into a trace beside it: job, rank, world_size.
    """

    def __init__(
        self,
        monotonic: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._monotonic = monotonic
        self._sleep = sleep
        self.session: RecordingSession | None = None
        self.exported: SimpleQueue[RecordingSession] = SimpleQueue()
        self.inbox = ""
        self.inbox_problem: str | None = "no_inbox"
        self.metadata: dict[str, Any] = {}
        self.budget = EventBudget()
        self.estimate_bytes = rendezvous.ESTIMATE_BYTES
        self._taken = 0
        self._exports = 0  # by the training thread
        self._delivered = 0  # by the helper
        self._torn_reads = 0
        self._closed = False
        profilers.listen(self.give_way)

    @property
    def exporting(self) -> bool:
        """Whether the helper thread has something to deliver yet."""
        return self._exports != self._delivered

    # --- in the training thread -----------------------------------------------------------------

    def follow(self, clock: CaptureClock, ring: RingWriter, number: int) -> None:
        """Read a new command, if any, as step ``number`` starts."""
        self.budget.before_step(number)
        fd = ring.command_fd
        if fd >= 0 and os.pread(fd, 8, 8) != ring.command_seen:
            self._read_command(clock, ring, number)
        if clock.capturing:
            self._step_begins(clock, number)

    @faults.guarded
    def step_ended(self, clock: CaptureClock, number: int) -> None:
        session = self.session
        if session is None or not session.prepared:
            # The step that paid for stop and export, if there was one, is over now.
            clock.flags = 0
            clock.capturing = session is not None
            return
        session.expire()
        session.note_work(number, clock.work)
        if session.dropped or not session.here:
            self._drop(session)
        elif number >= session.last_step:
            self._finish(session)
        else:
            self._advance(session, number + 1)

    @faults.guarded
    def interrupt(self, reason: str) -> None:
        """End a recording without a trace: what starts now is not a step's normal work."""
        session = self.session
        if session is not None and session.recording and session.here:
            session.fail(f"interrupted: {reason}")
            self._drop(session)

    def give_way(self) -> None:
        """End a recording because the program starts its own profiler in this thread.

        Outside the training thread, wait until the training thread has ended it: two sessions at
        once crash.
        """
        session = self.session
        if session is None or not session.prepared or session.command.kind != "torch":
            return
        session.fail("the program's own profiler began")
        if session.here:
            self._drop(session)
            return
        deadline = self._monotonic() + GIVE_WAY_S
        while self.session is session and session.lives and self._monotonic() < deadline:
            self._sleep(0.005)

    def exit(self, clock: CaptureClock) -> None:
        """End the session: a profiler that still runs can crash the interpreter's exit."""
        self._closed = True
        session = self.session
        if session is not None:
            session.fail("the process exits")
            if get_ident() == clock.thread:
                self._drop(session)

    def _read_command(self, clock: CaptureClock, ring: RingWriter, number: int) -> None:
        found = read_command(ring.command_fd)
        if found is None:
            self._torn_reads += 1
            if self._torn_reads >= MAX_TORN_READS:
                ring.command_seen = os.pread(ring.command_fd, 8, 8)
                self._torn_reads = 0
            return
        self._torn_reads = 0
        ring.command_seen, command = found
        # Stacks are the helper thread's, which needs no step for them.
        if command is not None and command.kind != "stacks":
            self._obey(clock, ring, command, number)

    def _obey(self, clock: CaptureClock, ring: RingWriter, command: Command, number: int) -> None:
        session = self.session
        same = session is not None and session.command.id == command.id
        if command.op == "cancel":
            if session is not None and same:
                session.disarm("cancelled")
                self._drop(session)
        elif not same:
            if session is not None:
                session.disarm("another capture was asked for")
                self._drop(session)
            self._arm(clock, ring, command, number)

    def _arm(self, clock: CaptureClock, ring: RingWriter, command: Command, number: int) -> None:
        refusal = self._refusal(command)
        if refusal:
            ring.event("capture_failed", id=command.id, detail=refusal)
        elif number > command.start_step - 1:
            ring.event("capture_late", id=command.id, step=number)
        else:
            recorder = self._recorder(command)
            self.session = RecordingSession(
                command, ring, self.inbox, recorder, number, self._monotonic
            )
            clock.capturing = True
            ring.event("capture_armed", id=command.id, step=command.start_step)

    def _refusal(self, command: Command) -> str | None:
        if self._closed:
            return "the process exits"
        return safety.refusal(
            safety.Situation(
                command, sys.modules.get("torch"), os.environ, self._taken, self.inbox_problem
            )
        )

    def _recorder(self, command: Command) -> Recorder:
        cuda = cuda_in_use(sys.modules.get("torch"))
        if command.kind == "memory":
            # With what it needs of the standard library it takes longer to import than the rest.
            from warpwatch.captures.memory import MemoryRecorder

            return MemoryRecorder(None if cuda is None else cuda.memory, command.steps)
        if command.kind == "nsys":
            return NsysRecorder(cuda)
        return TorchRecorder(command.options)

    def _step_begins(self, clock: CaptureClock, number: int) -> None:
        session = self.session
        if session is None:
            return
        session.expire()
        if session.dropped or (session.prepared and not session.here):
            self._drop(session)
        elif not session.prepared and number == session.first_step - 1:
            self._prepare(clock, session)
        elif session.recording:
            session.begun = True
        elif number >= session.first_step:
            session.disarm("the step before the first was not seen")
            self._drop(session)

    def _prepare(self, clock: CaptureClock, session: RecordingSession) -> None:
        # This order closes a race with a profiler started in another thread, which checks reversed.
        session.enter()
        refusal = self._refusal(session.command)
        if refusal:
            session.fail(refusal)
            self._drop(session)
            return
        self._taken += 1
        clock.flags = FLAG_PROFILED
        try:
            session.prepare()
        except Exception as error:
            self._fail(session, error)
            return
        session.ring.event("capture_started", id=session.command.id, step=session.first_step)

    def _advance(self, session: RecordingSession, number: int) -> None:
        try:
            if session.recording:
                session.recorder.next_step(number)
            elif number >= session.first_step:
                session.start()
        except Exception as error:
            self._fail(session, error)

    def _finish(self, session: RecordingSession) -> None:
        """Stop and export; the next step pays for it and is marked like the profiled ones."""
        try:
            session.finish(self.metadata)
        except Exception as error:
            self._fail(session, error)
            return
        self.session = None
        self._exports += 1
        self.exported.put(session)

    def _drop(self, session: RecordingSession) -> None:
        """Stop what runs. The flags of the step and ``capturing`` fall at its end."""
        session.dropped = True
        if session.prepared and not session.here:
            session.fail("the training thread ended")
        if session.prepared and (session.here or session.recorder.stops_anywhere):
            faults.guarded(session.recorder.drop)()
        self.session = None

    def _fail(self, session: RecordingSession, error: Exception) -> None:
        faults.swallow(error)
        session.fail(f"{type(error).__name__}: {error}"[:100])
        self._drop(session)
        session.recorder.discard(session.base)

    # --- in the helper thread -------------------------------------------------------------------

    def cancel(self, identifier: str) -> None:
        """Cancel the capture, because the training thread may not read the command in time."""
        session = self.session
        if session is not None and session.command.id == identifier:
            session.disarm("cancelled")

    def expire(self, clock: CaptureClock) -> None:
        """Give up a late capture, and stop its recorder: no step may follow.

        A recorder that only the training thread may stop ends at that thread's next phase.
        """
        session = self.session
        if session is not None:
            session.expire()
            if not (session.dropped and session.prepared):
                return
            if session.recorder.stops_anywhere:
                faults.guarded(session.recorder.drop)()
            elif not isinstance(clock.push, partial):
                clock.push = partial(self._stop_late, clock, session, clock.push)

    def _stop_late(
        self,
        clock: CaptureClock,
        session: RecordingSession,
        push: Callable[[Any], None],
        entry: Any,
    ) -> None:
        """Push the entry, and stop the recorder at this boundary of a phase.

        Not inside of a backward: autograd would then bring the stopped profiler back.
        """
        push(entry)
        if self.session is not session:
            clock.push = push
        elif session.here and not safety.is_in_backward(sys.modules.get("torch")):
            clock.push = push
            faults.guarded(self._drop)(session)

    def deliver(self, beat: Callable[[], None]) -> None:
        """Move exported captures to the inbox; delete those that nobody will fetch."""
        while not self.exported.empty():
            session = self.exported.get()
            try:
                if not session.ring.links():
                    session.fail("the ring was removed")
                elif not session.dropped:
                    session.deliver(beat)
                    self._learn(session)
            except Exception as error:
                faults.swallow(error)
                session.fail(f"{type(error).__name__}: {error}"[:100])
            finally:
                session.recorder.discard(session.base)
                self._delivered += 1

    def _learn(self, session: RecordingSession) -> None:
        recorder = session.recorder
        self.estimate_bytes = max(self.estimate_bytes, recorder.size_bytes)
        # Options add events, so only captures without options are representative.
        if recorder.events and not session.command.options:
            self.budget.learn(recorder.events, session.command.steps, session.operators)
