"""The engine of an inference server in this process, as the hooks of a server report it.

A process is a worker, the scheduler or the front end of the engine, or several of them at once. An
error in a hook is counted, and never reaches the server.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib import import_module
from typing import Any

from warpwatch import faults
from warpwatch.attach import attach
from warpwatch.identity import bounded
from warpwatch.iterations import IterationClock, ServeCounts
from warpwatch.monitor import Monitor

MAX_NOTE = 160
NO_PHASE: AbstractContextManager[Any] = nullcontext()


class ServerProcess:
    """The place of this process in a server. ``monitor`` is ``None`` until it is known.

    leads: whether a scheduler in this process ends iterations, not the worker. counts_tokens:
    whether no other rank with the same batch counts its tokens. is_separate: from the workers.
    """

    def __init__(self) -> None:
        self.monitor: Monitor | None = None
        self.clock: IterationClock | None = None
        self.counts: ServeCounts | None = None
        self.leads = self.is_separate = False
        self.counts_tokens = True
        self._server = ""
        self._notes: list[str] = []
        self._is_hooked = False

    def starts(self, library: str) -> bool:
        """Return whether to install the hooks now: once, unless the environment switches them off.

        The server calls its plug-in function several times.
        """
        hooks = os.environ.get("WARPWATCH_HOOKS")
        is_unlisted = hooks is not None and library not in map(str.strip, hooks.split(","))
        is_off = os.environ.get("WARPWATCH") == "0" or is_unlisted
        if is_off or self._is_hooked:
            return False
        self._is_hooked = True
        return True

    def identify(self, library: str) -> None:
        """Set the name and version of the server."""
        version = getattr(import_module(f"{library}.version"), "__version__", "")
        self._server = bounded(f"{library} {version}".strip(), 64, 64)

    def join(self, role: str, place: Mapping[str, Any]) -> Monitor | None:
        """Become a process of the server's job; the first role stays, as that of a worker."""
        if self.monitor is None:
            said = {**place, "role": role, "server": self._server}
            said["job"] = bounded(str(place.get("job") or self._server), 128, 384)
            if self._notes:
                said["note"] = bounded("; ".join(self._notes), MAX_NOTE, MAX_NOTE)
            monitor = attach(None, "serve", said)
            if not isinstance(monitor.clock, IterationClock):
                # The program has attached before, as a training.
                return None
            self.monitor, self.clock, self.counts = monitor, monitor.clock, monitor.clock.serving
            self.is_separate = role != "rank"
            ranks = place.get("parallel") or {}
            self.counts_tokens = not any(ranks.get(name, [0])[0] for name in ("tensor", "pipeline"))
        return self.monitor

    def note(self, text: str) -> None:
        """Report what the hooks cannot see, and why."""
        if text not in self._notes:
            self._notes.append(text)
        if self.monitor is not None:
            self.monitor.place["note"] = bounded("; ".join(self._notes), MAX_NOTE, MAX_NOTE)

    # --- iterations -----------------------------------------------------------------------------

    def lead(self) -> None:
        """Let the scheduler of this process set iterations, since it knows when it is idle."""
        if self.clock is not None:
            self.leads = self.clock.serving.exact = True
            self.clock.waits = False

    def begin(self, after_idle: bool) -> None:
        """Start an iteration, unless one runs."""
        monitor, clock = self.monitor, self.clock
        if monitor is not None and clock is not None and not clock.open:
            if monitor.step_clock != "iteration()":
                monitor.lead("iteration()")
            clock.samples, clock.after_idle = 0, after_idle
            clock.begin()

    def end(self, prefill_tokens: int, decode_requests: int, kv_tokens: int, tokens: int) -> None:
        """End the iteration with its work. ``tokens``: 0 if another rank counts them."""
        clock = self.clock
        if clock is not None:
            if not clock.open:
                self.begin(False)
            clock.work = prefill_tokens, decode_requests, kv_tokens
            clock.tokens = tokens
            clock.__exit__(None, None, None)

    def drop(self) -> None:
        """Forget the iteration that runs: it failed or came to nothing."""
        if self.clock is not None:
            self.clock.open = False

    def rest(self) -> None:
        """Note that no request is in flight."""
        if self.clock is not None:
            self.drop()
            self.clock.serving.rest(time.monotonic_ns())

    def shut_down(self) -> None:
        """Report that the server ends its processes, so that a silent exit is not a crash."""
        ring = None if self.clock is None else self.clock.ring
        if ring is not None:
            ring.event("shutdown", wait_s=0.2)

    def phase(self, name: str) -> AbstractContextManager[Any]:
        """Return a phase to enter once; it does nothing before the process has its place."""
        monitor, clock = self.monitor, self.clock
        if monitor is None or clock is None:
            return NO_PHASE
        phase = monitor.phase(name)
        return _marked(phase, name) if clock.capturing else phase

    def around(
        self,
        original: Callable[..., Any],
        *,
        before: Callable[..., object] | None = None,
        phase: str = "",
        after: Callable[..., object] | None = None,
    ) -> Callable[..., Any]:
        """Return the method in the phase ``phase``, with hooks that receive its arguments.

        It is in no phase if ``before`` returns False or fails. ``after`` also receives the result,
        first. An iteration in which the method fails does not count.
        """

        def call(*args: Any, **kwargs: Any) -> Any:
            has_work = False
            try:
                has_work = before is None or before(*args, **kwargs) is not False
            except Exception as error:
                faults.swallow(error)
            try:
                with self.phase(phase) if phase and has_work else NO_PHASE:
                    result = original(*args, **kwargs)
            except BaseException:
                self.drop()
                raise
            try:
                if after is not None:
                    after(result, *args, **kwargs)
            except Exception as error:
                faults.swallow(error)
            return result

        return call

    def switch(self, phase: str) -> None:
        """Attribute the time between phases to ``phase`` from now on."""
        if self.monitor is not None:
            self.monitor.switch(phase)


@contextmanager
def _marked(phase: AbstractContextManager[Any], name: str) -> Iterator[None]:
    """Show the phase in the trace: what the engine does before its first operator is its own."""
    from torch.autograd.profiler import record_function

    with phase, record_function(name):
        yield
