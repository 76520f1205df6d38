"""Guards calls that may never return: a stuck call is abandoned with its thread.

A call inside a driver or a library cannot be stopped from outside, but another thread can take
over the rest of the work.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from warpwatch_runtime.supervisor import LoopHandle, LoopRunner

# One ``run_all`` may leave this many threads behind.
MAX_THREADS = 64


class CallAbandoned(Exception):
    """The guard was given up: its holder must not use shared data any more."""


class CallGuard:
    """Guards the calls of one thread; other methods may be called from any thread."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._subject: object = None
        self._begun: float | None = None
        self._abandoned = False

    def call(self, subject: object, function: Callable[..., Any], *arguments: Any) -> Any:
        """Return ``function(*arguments)``, called for ``subject``, which is not None.

        Raises CallAbandoned instead of calling or returning once the guard is given up.
        """
        with self._lock:
            if self._abandoned:
                raise CallAbandoned
            self._subject = subject
            self._begun = self._monotonic()
        try:
            return function(*arguments)
        finally:
            self._leave()

    def _leave(self) -> None:
        with self._lock:
            self._begun = None
            if self._abandoned:
                raise CallAbandoned

    @property
    def in_flight(self) -> bool:
        return self._begun is not None

    def abandon(self) -> bool:
        """Refuse further calls. Return whether none is in flight, so that data may be freed."""
        with self._lock:
            self._abandoned = True
            return self._begun is None

    def abandon_if_stuck(self, stuck_after_s: float) -> object:
        """Give up a guard whose call lasts longer; return the subject of the call, or None."""
        with self._lock:
            begun = self._begun
            if self._abandoned or begun is None or self._monotonic() - begun < stuck_after_s:
                return None
            self._abandoned = True
            return self._subject


class GuardedLoop:
    """A loop that is given up if a call of its round does not return, and started again.

    ``step`` gets the guard for its calls. At most ``limit`` loops are started after the first.
    Every method may be called from any thread.
    """

    def __init__(
        self,
        supervisor: LoopRunner,
        name: str,
        interval_s: float,
        step: Callable[[CallGuard], None],
        limit: int,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._supervisor = supervisor
        self._name = name
        self._interval_s = interval_s
        self._step = step
        self._left = limit + 1
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._closed = False
        self._loop: LoopHandle | None = None
        # Abandoned guards with the subjects of their calls.
        self._hung: list[tuple[object, CallGuard]] = []
        self.guard = CallGuard(monotonic)
        self.running = False

    def begin(self) -> bool:
        """Start a loop unless one runs, and return whether one runs."""
        with self._lock:
            if self.running:
                return True
            if self._closed or not self._left:
                return False
            self._left -= 1
            guard = self.guard = CallGuard(self._monotonic)
            self._loop = self._supervisor.every(
                self._name, self._interval_s, lambda: self._round(guard)
            )
            self.running = True
            return True

    def _round(self, guard: CallGuard) -> None:
        with contextlib.suppress(CallAbandoned):
            self._step(guard)

    def give_up_if_stuck(self, stuck_after_s: float) -> object:
        """Stop the loop if its call lasts longer; return the subject of the call, or None."""
        guard = self.guard
        subject = guard.abandon_if_stuck(stuck_after_s)
        if subject is not None:
            self._hung.append((subject, guard))
            self.running = False
            if self._loop is not None:
                self._loop.stop()
        return subject

    @property
    def hanging(self) -> tuple[object, ...]:
        """The subjects of abandoned calls that have not returned."""
        return tuple(subject for subject, guard in self._hung if guard.in_flight)

    @property
    def in_flight(self) -> bool:
        return self.guard.in_flight or bool(self.hanging)

    def wake(self) -> None:
        if self._loop is not None:
            self._loop.wake()

    def close(self, timeout_s: float) -> bool:
        """Stop for good, and return whether no call is in flight after this time."""
        with self._lock:
            self._closed = True
            self.running = False
        if self._loop is not None:
            self._loop.stop(timeout_s)
        return self.guard.abandon()


def run_all(works: Mapping[str, Callable[[], object]], timeout_s: float | None = None) -> None:
    """Run each work in a thread of its name, and wait for all of them until the time-out.

    A thread that has not returned then goes on, but does not keep the process alive. Raises
    ValueError for more than MAX_THREADS.
    """
    if len(works) > MAX_THREADS:
        raise ValueError(f"{len(works)} threads, at most {MAX_THREADS}")
    threads = [
        threading.Thread(target=work, name=f"ww-{name}", daemon=True)
        for name, work in works.items()
    ]
    for thread in threads:
        thread.start()
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    for thread in threads:
        thread.join(None if deadline is None else max(0.0, deadline - time.monotonic()))
