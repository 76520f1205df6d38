"""Calls that may never return: watched from outside, given up, and left alone with their thread.

A call inside a driver or a library cannot be ended from outside. What can be done is to notice
that it does not return, and to let another thread serve what is left.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from warpwatch_runtime.supervisor import LoopHandle, LoopRunner

# Threads that one ``run_all`` may leave behind.
MAX_THREADS = 64


class CallAbandoned(Exception):
    """The guard was given up: whoever still holds it must touch nothing any more."""


class CallGuard:
    """``call`` is for one thread; everything else may be used from any."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._subject: object = None
        self._begun: float | None = None
        self._abandoned = False

    def call(self, subject: object, function: Callable[..., Any], *arguments: Any) -> Any:
        """``function(*arguments)`` on behalf of ``subject``, which is not None.

        Raises CallAbandoned instead of calling, or of returning, once the guard is given up.
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
        """No further call; whether none is in flight, so that what calls use may be freed."""
        with self._lock:
            self._abandoned = True
            return self._begun is None

    def abandon_if_stuck(self, stuck_after_s: float) -> object:
        """Give the guard up if its call lasts longer than that; the call's subject, or None."""
        with self._lock:
            begun = self._begun
            if self._abandoned or begun is None or self._monotonic() - begun < stuck_after_s:
                return None
            self._abandoned = True
            return self._subject


class GuardedLoop:
    """A loop that is given up when a call of its round does not return, and begun again.

    ``step`` gets the guard for its calls. At most ``limit`` loops are begun after the first.
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
        # Given up: on whose behalf the call was.
        self._hung: list[tuple[object, CallGuard]] = []
        self.guard = CallGuard(monotonic)
        self.running = False

    def begin(self) -> bool:
        """Whether there is a loop again; the old thread ends when its call ever returns."""
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
        """What the call is about that lasts longer than that, or None; the loop is over then."""
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
        """What the calls are about that were given up and have not returned."""
        return tuple(subject for subject, guard in self._hung if guard.in_flight)

    @property
    def in_flight(self) -> bool:
        return self.guard.in_flight or bool(self.hanging)

    def wake(self) -> None:
        if self._loop is not None:
            self._loop.wake()

    def close(self, timeout_s: float) -> bool:
        """Begin no other; whether no call is in flight after this time."""
        with self._lock:
            self._closed = True
            self.running = False
        if self._loop is not None:
            self._loop.stop(timeout_s)
        return self.guard.abandon()


def run_all(works: Mapping[str, Callable[[], object]], timeout_s: float | None = None) -> None:
    """Run each work in a thread that has its name, and wait so long for all of them.

    What has not returned by then is left to its thread, which does not keep the process. Raises
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
