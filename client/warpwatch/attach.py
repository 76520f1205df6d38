"""The one monitor of the process, and what happens to it at exit, at fork and at an exception."""

from __future__ import annotations

import atexit
import os
import platform
import sys
import threading
from collections.abc import Callable, Mapping
from functools import partial, wraps
from types import TracebackType
from typing import TYPE_CHECKING, Any

from warpwatch import faults, protocol
from warpwatch.iterations import IterationClock
from warpwatch.monitor import Monitor
from warpwatch.steps import StepClock, is_out_of_memory

if TYPE_CHECKING:
    from warpwatch.helper_thread import HelperThread

# How long the exit of the process waits for a capture that is being compressed.
EXIT_WAIT_S = 5.0
# The longest chain of exceptions raised while another was handled.
MAX_CAUSES = 10

_guard = threading.Lock()
_monitor: Monitor | None = None
_helper: HelperThread | None = None
_installed = False
# The steps before a failure that may end the program, and its events.
_failure: tuple[int, dict[str, dict[str, str]]] | None = None


def attach(
    job: str | None = None, kind: str = "train", place: Mapping[str, Any] | None = None
) -> Monitor:
    """Return the monitor of this process at once; it searches for a daemon in the background.

    ``kind`` is ``train``, or ``serve`` for a process of an inference server. ``place``: metadata
    of a server's process that its environment does not have.
    The first call decides. WARPWATCH=0 switches everything off. Never raises.
    """
    global _monitor
    with _guard:
        if _monitor is None:
            _monitor = Monitor(IterationClock() if kind == "serve" else StepClock())
            _monitor.place = {**({"kind": kind} if kind != "train" else {}), **(place or {})}
            try:
                _start(_monitor, job)
            except Exception as error:
                faults.swallow(error)
        return _monitor


def _start(monitor: Monitor, job: str | None) -> None:
    global _helper
    # The protocol needs 64-bit little-endian Linux.
    is_able = sys.platform == "linux" and sys.byteorder == "little" and sys.maxsize > 1 << 32
    if os.environ.get("WARPWATCH") == "0" or not is_able:
        monitor.clock.drop()
        return
    # Imported once the process trains: it imports much, and few processes under ``run`` are ranks.
    from warpwatch.helper_thread import HelperThread

    # platform caches what it reads; reading belongs here and not into the helper's loop.
    platform.python_version()
    _helper = HelperThread(monitor, job, os.environ)
    _install()
    _helper.start()


def _install() -> None:
    global _installed
    multiprocessing = sys.modules.get("multiprocessing.util")
    if multiprocessing is not None:
        # A child of it ends without atexit, and drops the finalizers of its parent.
        multiprocessing.Finalize(None, _at_child_exit, exitpriority=0)
    if _installed:
        return
    _installed = True
    atexit.register(_at_exit)
    os.register_at_fork(after_in_child=_in_child)
    previous = sys.excepthook

    def excepthook(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        _report_exception(error)
        previous(kind, error, trace)

    sys.excepthook = excepthook
    _watch_thread()
    _watch_end(sys, "exit", _note_failure)
    _watch_end(os, "_exit", _at_hard_exit)
    for name in ("execv", "execve"):  # all others call these
        _watch_end(os, name, partial(_set_ended, 1), partial(_set_ended, 0))


def _watch_thread() -> None:
    """Report the exception that ends a training in a thread while the process lives on."""
    previous = threading.excepthook

    def excepthook(about: threading.ExceptHookArgs) -> None:
        thread = None if _monitor is None else _monitor.clock.trainer
        error = about.exc_value
        if about.thread is thread and error is not None and not isinstance(error, SystemExit):
            _report_exception(error)
        previous(about)

    threading.excepthook = excepthook


def _watch_end(
    module: Any, name: str, before: Callable[..., object], failed: Callable[[], object] = int
) -> None:
    """Call ``before`` when the program ends by this function, and ``failed`` if it does not."""
    original = getattr(module, name)

    @wraps(original)
    def end(*args: Any, **kwargs: Any) -> None:
        try:
            before(*args, **kwargs)
        finally:
            # Also if a signal's handler raises meanwhile: the caller expects no return.
            try:
                original(*args, **kwargs)
            finally:
                failed()

    setattr(module, name, end)


@faults.guarded
def _note_failure(status: Any = None) -> None:
    """Keep the exception whose handler calls ``sys.exit(1)``, to be reported at the exit."""
    global _failure
    error = sys.exc_info()[1]
    # At a prompt and in other threads the process goes on.
    ends = threading.current_thread() is threading.main_thread() and not hasattr(sys, "ps1")
    if ends and _monitor and isinstance(error, Exception) and status is not None and status != 0:
        # Something may catch the SystemExit. The error itself would keep its frames alive.
        _failure = _monitor.clock.steps, _events_of(error)


def _at_hard_exit(status: int) -> None:
    """Run the exit handler on ``os._exit(0)``, which programs use to skip a hanging exit."""
    if status == 0:
        _at_exit()


@faults.guarded
def _set_ended(ended: int, *_: Any, **__: Any) -> None:
    if _monitor is not None and _monitor.clock.ring is not None:
        _monitor.clock.ring.words[protocol.WORD_ENDED] = ended


@faults.guarded
def _report_exception(error: BaseException) -> None:
    _report(_events_of(error))


def _report(events: Mapping[str, Mapping[str, str]]) -> None:
    if _monitor is None or _monitor.clock.ring is None:
        return
    clock, ring = _monitor.clock, _monitor.clock.ring
    clock.settle(helping=threading.get_ident() != clock.thread)
    for name, detail in events.items():
        ring.event(name, wait_s=0.2, **detail)


def _events_of(error: BaseException) -> dict[str, dict[str, str]]:
    """Return the events of the error that ended the program, by name."""
    error = _interrupt_before(error) or error
    text = str(error)[:100]
    found = {"oom": {"detail": text}} if is_out_of_memory(error) else {}
    return {**found, "exception": {"type": type(error).__name__[:64], "detail": text}}


def _interrupt_before(error: BaseException) -> BaseException | None:
    """Return the interrupt during whose handling the error was raised: it ended the program."""
    cause: BaseException | None = error
    for _ in range(MAX_CAUSES):
        if cause is None or isinstance(cause, KeyboardInterrupt):
            return cause
        cause = cause.__cause__ or cause.__context__
    return None


@faults.guarded
def _at_child_exit() -> None:
    """Report the exception that ends a child of multiprocessing, which calls no hook for it."""
    error = sys.exc_info()[1]
    if isinstance(error, Exception):
        _report_exception(error)
    _at_exit()


@faults.guarded
def _at_exit() -> None:
    global _helper
    if _failure is not None and _monitor is not None and _monitor.clock.steps == _failure[0]:
        _report(_failure[1])
    helper, _helper = _helper, None
    if helper is not None:
        helper.finish(EXIT_WAIT_S)


@faults.guarded
def _in_child() -> None:
    global _guard, _monitor, _helper
    monitor, helper = _monitor, _helper
    _guard, _monitor, _helper = threading.Lock(), None, None
    if monitor is not None:
        monitor.clock.drop()
    if helper is not None:
        helper.drop()
