"""Runs the helper thread: finds a daemon, writes the heartbeat, and does the slow work."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from queue import Empty
from types import FrameType
from typing import Any

from warpwatch import faults, identity, model, protocol, rendezvous, ring, stacks
from warpwatch._version import __version__
from warpwatch.captures import Captures, profilers
from warpwatch.captures.recording import cuda_in_use, open_commands, read_command
from warpwatch.gc_pauses import GcPauses
from warpwatch.gil_stacks import GilStacks
from warpwatch.monitor import Monitor
from warpwatch.rendezvous import DaemonFolder, find_daemon

HEARTBEAT_INTERVAL_S = 0.5
ATTACH_INTERVAL_S = 5.0
NEW_RING_S = 10.0
NEW_RING_INTERVAL_S = 0.1
# A file that was replaced stays open this long: the training thread may be about to use it.
RETIRE_AFTER_S = 10.0
INBOX_CHECK_INTERVAL_S = 5.0


class HelperThread:
    """The helper thread of a monitor. It gives the clock its ring and its captures."""

    def __init__(
        self,
        monitor: Monitor,
        job: str | None,
        environ: Mapping[str, str],
        monotonic: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._monotonic = monotonic
        self._wait = sleep
        self.monitor = monitor
        self.clock = monitor.clock
        self.captures = Captures(monotonic, sleep)
        self._gil_stacks = GilStacks(environ, monotonic)
        self._gc_pauses = GcPauses(self.clock, environ)
        self._job = job
        self._environ = environ
        self._interval_s = _positive(environ.get("WARPWATCH_ATTACH_INTERVAL_S"), ATTACH_INTERVAL_S)
        self._ring: ring.RingWriter | None = None
        self._folder: DaemonFolder | None = None
        self._identity: dict[str, Any] = {}
        self._metadata: dict[str, Any] = {}
        self._seen = bytes(8)
        self._next_attach = self._attached = 0.0
        self._next_inbox_check = 0.0
        self._trains = True
        self._retired: list[tuple[float, Callable[[], None]]] = []
        self.stopping = False
        self._thread = threading.Thread(target=self._run, name="warpwatch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        while not self.stopping:
            faults.guarded(self._round)()
            with suppress(Exception):
                faults.log_pending()
            self._sleep()

    def _sleep(self) -> None:
        current = self._ring
        if current is not None:
            # The daemon makes the command file as soon as it sees the ring.
            new = current.command_fd < 0 and self._monotonic() < self._attached + NEW_RING_S
            interval = NEW_RING_INTERVAL_S if new else HEARTBEAT_INTERVAL_S
        else:
            interval = self._interval_s if self._belongs else ATTACH_INTERVAL_S
        try:
            self.clock.wake_helper.get(timeout=interval)
        except Empty:
            return

    @property
    def _belongs(self) -> bool:
        """Whether the process is a rank."""
        return bool(self.clock.begun) or self.monitor.serving is not None

    def _round(self) -> None:
        now = self._monotonic()
        self.clock.wall_offset_ns = time.time_ns() - time.monotonic_ns()
        while self._retired and self._retired[0][0] <= now:
            self._retired.pop(0)[1]()
        # Under ``run`` a hook watches the program's profiler from its import on.
        profiler = sys.modules.get(profilers.PROFILER_MODULE)
        if profiler is not None:
            profilers.watch_program_profiler(profiler)
        self.clock.settle(helping=True)
        current = self._ring
        self.captures.deliver(self._sign_of_life)
        self.captures.expire(self.clock)
        if current is None:
            # A process becomes a rank at its first step, one of a server at once.
            if self._belongs and now >= self._next_attach:
                self._next_attach = now + self._interval_s
                self._attach()
            return
        if not current.links():
            self._detach(current, now)
            return
        self._serve(current, now)

    # --- attached -------------------------------------------------------------------------------

    def _serve(self, current: ring.RingWriter, now: float) -> None:
        self._sign_of_life()
        self._note_end(current)
        self.clock.report_begun(current)
        current.flush(wait_s=0.05)
        self._follow_commands(current, now)
        self._check_inbox(now)
        self._notice_cuda()
        self._gc_pauses.report(current, now)
        if self.monitor.serving is not None:
            self.monitor.serving.write(current, time.monotonic_ns())
        self._write_metadata(current)

    def _sign_of_life(self) -> None:
        """Write the heartbeat, also between the parts of long work of this thread."""
        if self._ring is not None:
            self._ring.beat(self.clock.calls())
            self._gil_stacks.rearm(self._monotonic())

    def _note_end(self, current: ring.RingWriter) -> None:
        """Report that training is over or goes on: a later end of the process is not its fault."""
        trained = self._trains
        self._trains = not is_over(self.clock.trainer, self.clock.thread)
        if trained != self._trains and not self.stopping:
            current.words[protocol.WORD_ENDED] = trained

    def _write_metadata(self, current: ring.RingWriter) -> None:
        metadata = self._describe()
        if metadata != self._metadata:
            current.write_metadata(metadata)
            self._metadata = metadata

    def _follow_commands(self, current: ring.RingWriter, now: float) -> None:
        lost = current.lost_commands()
        if lost is not None:
            self._retired.append((now + RETIRE_AFTER_S, lost.close))
        if current.command_fd < 0 and self._folder is not None:
            folder = self._folder
            fd = open_commands(folder.fd, current.name, folder.owner_uid)
            if fd >= 0:
                current.open_commands(fd)
        if current.command_fd < 0 or os.pread(current.command_fd, 8, 8) == self._seen:
            return
        found = read_command(current.command_fd)
        if found is None:
            return
        self._seen, command = found
        if command is not None and command.op == "cancel":
            self.captures.cancel(command.id)
        elif command is not None and command.kind == "stacks":
            self._serve_stacks(current, command.id)

    def _serve_stacks(self, current: ring.RingWriter, identifier: str) -> None:
        current.event("capture_started", wait_s=0.05, id=identifier)
        try:
            if self.captures.inbox_problem:
                raise OSError(self.captures.inbox_problem)
            found = stacks.snapshot(self._identity["job"], self._identity["rank"])
            base = os.path.join(self.captures.inbox, f"{identifier}.{current.name}")
            data = json.dumps(found).encode()
            token = rendezvous.hand_over(
                base, ".stacks.json", lambda fd: rendezvous.write(fd, data)
            )
        except Exception as error:
            current.event("capture_failed", wait_s=0.05, id=identifier, detail=str(error)[:100])
            return
        current.event("capture_finished", wait_s=0.05, id=identifier, token=token)

    def _check_inbox(self, now: float) -> None:
        if now >= self._next_inbox_check:
            self._next_inbox_check = now + INBOX_CHECK_INTERVAL_S
            captures = self.captures
            captures.inbox_problem = rendezvous.inbox_problem(
                captures.inbox, captures.estimate_bytes
            )

    def _notice_cuda(self) -> None:
        """Pass torch.cuda to the training thread, which alone may use it, once it is in use."""
        if self.clock.cuda is None and self._environ.get("WARPWATCH_CUDA_EVENTS") != "0":
            self.clock.cuda = cuda_in_use(sys.modules.get("torch"))

    def _describe(self) -> dict[str, Any]:
        device = self._environ.get("WARPWATCH_GPU_UUID") or self.clock.device
        events = self.captures.budget.events_per_step
        # Two significant digits, so that what is written changes seldom.
        elsewhere = int(float(f"{self.clock.steps_elsewhere:.1e}"))
        place = self.monitor.place
        parallel = place.get("parallel") or model.places(self._monotonic())
        about = {
            **self.monitor.model,
            **self._identity,
            # What a server's hooks have found out since the ring was made.
            **{name: place[name] for name in ("role", "server", "note") if place.get(name)},
            "device": identity.bounded(device, 64, 64) if device else None,
            "phases": list(self.clock.phase_names),
            # Between two trainings the last step clock is kept.
            "step_clock": self.monitor.step_clock or self._metadata.get("step_clock", ""),
            "client": __version__,
            "inbox_ok": self.captures.inbox_problem is None,
            **({"parallel": parallel} if parallel else {}),
            **({"events_per_step": events} if events else {}),
            **({"steps_elsewhere": elsewhere} if elsewhere else {}),
            **({"held_stacks": self._gil_stacks.name} if self._gil_stacks.name else {}),
            "faults": faults.count(),
        }
        known = ("rank", "job", "world_size", "parallel", "kind")
        self.captures.metadata = {name: about[name] for name in known if name in about}
        return identity.fitted(about)

    # --- attach and detach ----------------------------------------------------------------------

    def _attach(self) -> None:
        folder = find_daemon(self._environ, os.geteuid())
        if folder is None:
            return
        try:
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
            ranks_fd = os.open(rendezvous.RANKS, flags, dir_fd=folder.fd)
            try:
                self._create_ring(folder, ranks_fd)
            finally:
                os.close(ranks_fd)
        except BaseException:
            os.close(folder.fd)
            raise

    def _create_ring(self, folder: DaemonFolder, ranks_fd: int) -> None:
        self.captures.inbox = rendezvous.inbox(folder.candidate, self._environ, os.geteuid())
        self.captures.inbox_problem = rendezvous.inbox_problem(self.captures.inbox)
        self._identity = identity.describe(self._job, self._environ, self.monitor.place)
        name = ring.ring_name(self._identity["job"], self._identity["rank"])
        about = {key: self._identity[key] for key in ("job", "rank")}
        self._gil_stacks.open(self.captures.inbox, name, about)
        self._metadata = self._describe()
        self._ring = created = ring.create(ranks_fd, name, self._metadata)
        self._folder = folder
        self._attached = self._monotonic()
        self._seen = bytes(8)
        clock = self.clock
        clock.captures = self.captures
        clock.ring = created
        clock.report_begun(created)

    def _detach(self, current: ring.RingWriter, now: float) -> None:
        """Go on without the removed or closed ring until a daemon is found again."""
        self.clock.ring = None
        self._ring = None
        session = self.captures.session
        if session is not None and session.ring is current:
            session.disarm("the ring was removed")
        folder, self._folder = self._folder, None
        if folder is not None:
            folder.close()
        self._retired.append((now + RETIRE_AFTER_S, current.close))
        self._gil_stacks.close()
        self._next_attach = now

    # --- the end --------------------------------------------------------------------------------

    def finish(self, wait_s: float) -> None:
        """Finish at exit: wait for a running export, then write the last steps and the event."""
        captures = self.captures
        deadline = self._monotonic() + wait_s
        while captures.exporting and self._monotonic() < deadline:
            self.clock.wake_helper.put(None)
            self._wait(0.02)
        self.stopping = True
        self._gil_stacks.end()
        self._gc_pauses.drop()
        captures.exit(self.clock)
        current = self._ring
        if current is None:
            return
        try:
            self.clock.finish()
            self.clock.report_begun(current)
            if self.monitor.serving is not None:
                self.monitor.serving.write(current, time.monotonic_ns(), force=True)
            self._write_metadata(current)
        except Exception as error:
            faults.swallow(error)
        current.event("exit", wait_s=0.2)
        current.words[protocol.WORD_ENDED] = 1

    def drop(self) -> None:
        """Close all files in a forked child; this does not release the parent's lock."""
        self.stopping = True
        self._gil_stacks.drop()
        self._gc_pauses.drop()
        profilers.forget_program_profilers()
        for file in (self._ring, self._folder):
            if file is not None:
                file.close()
        self._ring = self._folder = None


def _positive(text: str | None, default: float) -> float:
    try:
        value = float(text or default)
    except ValueError:
        return default
    return value if 0 < value < 3600 else default


# The functions that run a cell, a script or a module in IPython's shell and in notebooks. Since
# Python 3.13 its own prompt is Python code too (Lib/_pyrepl), with a function for each statement.
_SHELL_FILES = ("interactiveshell.py", "/code.py")
_SHELL_RUNS = frozenset({"run_code", "safe_execfile", "safe_run_module", "runcode"})
_PROMPT_FILE = "/_pyrepl/main.py"


def is_over(trainer: threading.Thread, ident: int) -> bool:
    """Return whether the training thread has ended, or is back at a prompt and runs no code.

    Prompts are Python's own and those of IPython and notebooks. ``ident`` is 0 before the first
    step.
    """
    if not ident:
        return False
    try:
        if not trainer.is_alive():
            return True
    except RuntimeError:
        # A thread that Python has not started says so in this way.
        return True
    frame = sys._current_frames().get(ident)
    return frame is None or (trainer is threading.main_thread() and _is_at_prompt(frame))


def _has_shell() -> bool:
    shell: Any = sys.modules.get("IPython")
    return shell is not None and shell.get_ipython() is not None


def _is_at_prompt(frame: FrameType | None) -> bool:
    is_shell = _has_shell()
    while frame is not None:
        code = frame.f_code
        if code.co_name in _SHELL_RUNS and code.co_filename.endswith(_SHELL_FILES):
            return False
        is_shell = is_shell or code.co_filename.endswith(_PROMPT_FILE)
        frame = frame.f_back
    return is_shell
