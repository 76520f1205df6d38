"""Provides stacks of a process while a C call holds its GIL, by faulthandler's thread. Opt-in.

The helper thread rearms faulthandler's timer. If it cannot, the timer's thread wakes and writes
into a pipe that is kept full, so it sleeps there. If the daemon sees no heartbeat, it empties the
pipe, and only then the thread reads the stacks. Reading them while threads run crashes every
Python.

The process has only one such timer: if the program uses it, the shim gives it up for good.
"""

from __future__ import annotations

import fcntl
import json
import os
import stat
import sys
import termios
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import wraps
from types import ModuleType
from typing import Any

from warpwatch import faults, stacks
from warpwatch.rendezvous import Descriptor

# A hang is found after 10 s without a heartbeat, and is to be answered within 15 s of that.
TIMEOUT_S = 15.0
MIN_TIMEOUT_S = 1.0
REARM_S = 2.0
SUFFIX = ".stacks.fifo"
# The usual size of a pipe: a dump of some hundred frames fits into it once it is empty.
PIPE_BYTES = 64 << 10
# Signals that can be blocked, of the classic 31: all but SIGKILL and SIGSTOP.
_BLOCKABLE = 0x7FFFFFFF & ~(1 << 8) & ~(1 << 18)

# Guards the timer. It is held during a fork, of which the timer's thread does not know.
_guard = threading.RLock()
_installed = False
_users_own = False
_armed: GilStacks | None = None
# faulthandler's own functions: those that the program finds there step in for it.
_functions: dict[str, Callable[..., Any]] = {}


class GilStacks:
    """The named pipe of one ring, in the inbox. ``end`` may be called from any thread.

    Its first line is JSON: rank, job, the main thread's ident, the threads' names by ident; empty
    lines fill it up.
    """

    def __init__(
        self, environ: Mapping[str, str], monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._monotonic = monotonic
        self.timeout_s = _timeout_s(environ)
        self._path = ""
        self._pipe: Descriptor | None = None
        self._about: dict[str, Any] = {}
        self._head = b""
        self._full = 0
        self._next_arm = 0.0
        self._armed_at = 0.0
        self._ended = False
        self._watchdog: str | None = None

    @property
    def name(self) -> str | None:
        """The pipe's name in the inbox, None while there is none."""
        return os.path.basename(self._path) if self._pipe and not _users_own else None

    def open(self, folder: str, ring_name: str, about: dict[str, Any]) -> None:
        """Make the pipe; if that fails, go on without one."""
        self.close()
        if not self.timeout_s or _users_own or not _has_gil():
            return
        self._path = os.path.join(folder, f"held.{ring_name}{SUFFIX}")
        try:
            if not _install():
                return
            os.mkfifo(self._path, 0o600)
            flags = os.O_RDWR | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
            pipe = Descriptor(os.open(self._path, flags))
            if not stat.S_ISFIFO(os.fstat(pipe.fd).st_mode):
                # It is another file that was put in its place.
                pipe.close()
                return
            self._pipe = pipe
            self._about, self._head, self._next_arm = about, b"", 0.0
            self._ended, self._watchdog = False, None
        except Exception as error:
            faults.swallow(error)

    def rearm(self, now: float) -> None:
        """Postpone the timer. ``now`` is monotonic, in seconds."""
        pipe = self._pipe
        if pipe is None or now < self._next_arm:
            return
        self._next_arm = now + min(REARM_S, self.timeout_s / 4)
        if not pipe.links() or _users_own:
            self.close()
        elif self._is_replaced():
            _step_back()
            self.close()
        else:
            # The daemon removes files of the inbox that are not touched for an hour.
            os.utime(pipe.fd)
            self._arm(pipe.fd)

    def close(self) -> None:
        """Stop the timer, close and remove the pipe."""
        self.end()
        self.drop()

    def end(self) -> None:
        """Stop the timer and unlink the pipe; the helper may still use the descriptor."""
        with _guard:
            self._ended = True
            if _armed is self:
                self.disarm()
        if self._pipe is not None:
            with suppress(OSError):
                os.unlink(self._path)

    def drop(self) -> None:
        """Close the pipe without removing it: in a forked child it is the parent's."""
        pipe, self._pipe = self._pipe, None
        if pipe is not None:
            pipe.close()

    def disarm(self) -> None:
        """Stop the timer; if its thread has woken, let it finish.

        It then reads the stacks of all threads: the GIL is held until it has finished, so that none
        of them runs. Writes that do not fit are lost, so that it does not block.
        """
        global _armed
        _armed = None
        pipe = self._pipe
        cancel = _functions["cancel_dump_traceback_later"]
        if pipe is None or pipe.links() is None:
            # Closed by the program: a thread that has woken cannot be called back.
            if not self._is_over():
                cancel()
            return
        os.set_blocking(pipe.fd, False)
        if not self._is_over():
            cancel()
            return
        import ctypes

        read, buffer = ctypes.PyDLL(None).read, ctypes.create_string_buffer(PIPE_BYTES)
        number, size = ctypes.c_int(pipe.fd), ctypes.c_size_t(PIPE_BYTES)
        self._head = b""
        # A turn of the GIL of its own: no other thread asks for it back before 5 ms.
        time.sleep(0.0001)
        read(number, buffer, size)
        cancel()

    def _arm(self, fd: int) -> None:
        global _armed
        with _guard:
            if _users_own or self._ended:
                return
            self._fill(fd)
            before = set(os.listdir("/proc/self/task"))
            # From here to the end nothing gives the GIL away: between two timers there is none,
            # and a timer that ends while the pipe does not block writes nothing.
            time.sleep(0.0001)
            os.set_blocking(fd, False)
            if _armed is self and self._is_over():
                self._next_arm = 0.0
                return
            self._armed_at = self._monotonic()
            _functions["dump_traceback_later"](self.timeout_s, repeat=False, file=fd)
            os.set_blocking(fd, True)
            _armed = self
            new = set(os.listdir("/proc/self/task")) - before
        self._watchdog = f"/proc/self/task/{new.pop()}" if len(new) == 1 else None

    def _fill(self, fd: int) -> None:
        """Fill the pipe, and again if the threads have changed or the pipe was read."""
        main = threading.main_thread().ident
        head = {**self._about, "main": main, "threads": stacks.thread_names()}
        data = json.dumps(head).encode()[: PIPE_BYTES // 2] + b"\n"
        over = _armed is self and self._is_over()
        if data == self._head and _bytes_in(fd) == self._full and not over:
            return
        if _armed is self:
            self.disarm()
        os.set_blocking(fd, False)
        with suppress(BlockingIOError):
            while os.read(fd, PIPE_BYTES):
                pass
        os.write(fd, data)
        for part in (b"\n" * 4096, b"\n"):
            with suppress(BlockingIOError):
                while os.write(fd, part):
                    pass
        self._head, self._full = data, _bytes_in(fd)

    def _is_over(self) -> bool:
        """Return whether the timer may have fired: its thread then sleeps in its write."""
        return self._monotonic() - self._armed_at >= self.timeout_s

    def _is_replaced(self) -> bool:
        """Return whether the timer's thread ended early: the program uses an unwrapped timer."""
        return (
            not self._is_over()
            and self._watchdog is not None
            and not os.path.exists(self._watchdog)
        )


def _bytes_in(fd: int) -> int:
    return int.from_bytes(fcntl.ioctl(fd, termios.FIONREAD, bytes(4)), sys.byteorder)


def _install() -> bool:
    """Take the timer, unless the program has armed it already."""
    global _installed
    if _installed:
        return not _users_own
    _installed = True
    known = "faulthandler" in sys.modules
    import faulthandler

    # Before the look at who has armed it: the program may do so in the meantime.
    for name in ("dump_traceback_later", "cancel_dump_traceback_later"):
        _functions[name] = getattr(faulthandler, name)
        _wrap(faulthandler, name)
    if known and _is_armed_already():
        _step_back()
        return False
    os.register_at_fork(
        before=_before_fork,
        after_in_parent=lambda: _guard.release(),
        after_in_child=_after_in_child,
    )
    return True


def _wrap(faulthandler: ModuleType, name: str) -> None:
    original = _functions[name]

    @wraps(original)
    def of_the_program(*arguments: Any, **named: Any) -> Any:
        with _guard:
            _disarm()
            _step_back()
        return original(*arguments, **named)

    setattr(faulthandler, name, of_the_program)


def _step_back() -> None:
    """Never use the timer again; it is the program's."""
    global _users_own, _armed
    with _guard:
        _users_own, _armed = True, None


@faults.guarded
def _disarm() -> None:
    if _armed is not None:
        _armed.disarm()


def _before_fork() -> None:
    """Disarm: a child that inherits the armed timer waits for its thread at exit, for ever."""
    _guard.acquire()
    _disarm()


def _after_in_child() -> None:
    global _guard
    _guard = threading.RLock()


def _is_armed_already() -> bool:
    """Return whether faulthandler's thread runs: it blocks all signals and has the main name."""
    with open("/proc/self/comm", encoding="utf-8", errors="replace") as file:
        own = file.read().strip()
    for task in os.listdir("/proc/self/task"):
        with suppress(OSError), open(f"/proc/self/task/{task}/status", encoding="utf-8") as file:
            fields = dict(line.split(":\t", 1) for line in file if ":\t" in line)
            blocked = int(fields["SigBlk"], 16)
            if fields["Name"].strip() == own and blocked & _BLOCKABLE == _BLOCKABLE:
                return True
    return False


def _has_gil() -> bool:
    enabled: Callable[[], bool] | None = getattr(sys, "_is_gil_enabled", None)
    return enabled is None or enabled()


def _timeout_s(environ: Mapping[str, str]) -> float:
    """Return the seconds without a heartbeat until stacks are ready; 0, the default, is off."""
    if environ.get("WARPWATCH_HELD_STACKS", "0") in ("", "0"):
        return 0.0
    try:
        seconds = float(environ.get("WARPWATCH_HELD_STACKS_S", TIMEOUT_S))
    except ValueError:
        return TIMEOUT_S
    return max(MIN_TIMEOUT_S, min(seconds, 3600.0))
