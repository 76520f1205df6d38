"""Runs all loops: every periodic piece of work runs here and nowhere else.

A loop that raises is logged and counted and goes on. A loop that does not return shows it by
``busy_s`` and delays no other loop. Devices see loops through LoopHandle and LoopRunner.

Loops take the clock (``monotonic``, seconds) and the way to wait between rounds from their caller.
``wait`` gets the event that ends the wait early and the seconds to wait; it returns whether the
event was set.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Protocol

from warpwatch_telemetry.newest import NewestMap

logger = logging.getLogger(__name__)


class LoopHandle(Protocol):
    """A loop as its starter sees it."""

    interval_s: float
    last_duration_s: float

    @property
    def alive(self) -> bool: ...

    @property
    def busy_s(self) -> float:
        """Seconds that the current round has taken so far; 0 between rounds."""

    def wake(self) -> None:
        """Run the next round now instead of at its time."""

    def stop(self, timeout_s: float = 0.0) -> None: ...


class LoopRunner(Protocol):
    """The loop interface for sources."""

    def every(self, name: str, interval_s: float, step: Callable[[], None]) -> LoopHandle: ...


Wait = Callable[[threading.Event, float], bool]

# The same error of a loop is logged once in this time.
ERROR_LOG_INTERVAL_S = 60.0
MAX_ERRORS = 100
# One ``run_all`` may leave this many threads behind.
MAX_THREADS = 64
# The first pause of a loop after a failure of another server or store, and the longest.
FIRST_S = 5.0
LONGEST_S = 120.0


class Loop:
    """Runs ``step`` in its own thread every ``interval_s``, without drift."""

    def __init__(
        self,
        name: str,
        interval_s: float,
        step: Callable[[], None],
        monotonic: Callable[[], float] = time.monotonic,
        wait: Wait = threading.Event.wait,
    ) -> None:
        self.name = name
        self.interval_s = interval_s
        self.runs = 0
        self.failures = 0
        self.last_duration_s = 0.0
        self._step = step
        self._monotonic = monotonic
        self._wait = wait
        self._begun: float | None = None
        self._stop = threading.Event()
        self._wake = threading.Event()
        # When errors were logged, by their text.
        self._logged: NewestMap[str, float] = NewestMap(MAX_ERRORS)
        self._thread = threading.Thread(target=self._run, name=f"ww-{name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wake(self) -> None:
        """Run the next round now instead of at its time."""
        self._wake.set()

    def stop(self, timeout_s: float = 0.0) -> None:
        self._stop.set()
        self._wake.set()
        if timeout_s and self._thread.is_alive():
            self._thread.join(timeout_s)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def busy_s(self) -> float:
        """Seconds that the current round has taken so far; 0 between rounds."""
        begun = self._begun
        return 0.0 if begun is None else self._monotonic() - begun

    def _run(self) -> None:
        deadline = self._monotonic()
        while not self._stop.is_set():
            self._begun = self._monotonic()
            self._round()
            ended = self._monotonic()
            self.last_duration_s = ended - self._begun
            self._begun = None
            deadline = max(deadline + self.interval_s, ended)
            if self._wait(self._wake, max(0.0, deadline - self._monotonic())):
                self._wake.clear()
                deadline = self._monotonic()

    def _round(self) -> None:
        try:
            self._step()
        except Exception as error:
            self.failures += 1
            self._log(error)
        self.runs += 1

    def _log(self, error: Exception) -> None:
        text = f"{type(error).__name__}: {error}"
        now = self._monotonic()
        if now - self._logged.get(text, -ERROR_LOG_INTERVAL_S) >= ERROR_LOG_INTERVAL_S:
            self._logged[text] = now
            logger.error("loop %s failed: %s", self.name, text, exc_info=True)


class Supervisor:
    """Owns all loops, their threads and exceptions, and stops them together."""

    def __init__(
        self,
        monotonic: Callable[[], float] = time.monotonic,
        wait: Wait = threading.Event.wait,
    ) -> None:
        self._monotonic = monotonic
        self._wait = wait
        self._lock = threading.Lock()
        self._loops: list[Loop] = []
        # Failures of stopped loops by name.
        self._past_failures: Counter[str] = Counter()

    def every(self, name: str, interval_s: float, step: Callable[[], None]) -> Loop:
        loop = Loop(name, interval_s, step, self._monotonic, self._wait)
        with self._lock:
            for other in self._loops:
                if not other.alive:
                    self._past_failures[other.name] += other.failures
            self._loops = [other for other in self._loops if other.alive] + [loop]
            loop.start()
        return loop

    def failures(self) -> dict[str, int]:
        """Return the failed rounds by the loop's name, also of stopped loops."""
        with self._lock:
            counts = Counter(self._past_failures)
            for loop in self._loops:
                counts[loop.name] += loop.failures
        return dict(counts)

    def durations_s(self) -> dict[str, float]:
        """Return the duration of each loop's newest round."""
        return {loop.name: loop.last_duration_s for loop in self.loops if loop.alive}

    @property
    def loops(self) -> tuple[Loop, ...]:
        with self._lock:
            return tuple(self._loops)

    def stop(self, timeout_s: float = 3.0) -> None:
        """Stop all loops, and wait at most ``timeout_s`` for all of them together."""
        loops = self.loops
        for loop in loops:
            loop.stop()
        deadline = self._monotonic() + timeout_s
        for loop in loops:
            loop.stop(max(0.01, deadline - self._monotonic()))


class Pause:
    """A pause of FIRST_S, doubled with each failure up to ``longest_s``."""

    def __init__(
        self, monotonic: Callable[[], float] = time.monotonic, longest_s: float = LONGEST_S
    ) -> None:
        self._monotonic = monotonic
        self._longest_s = longest_s
        self._pause_s = 0.0
        self._until = float("-inf")

    @property
    def lasts(self) -> bool:
        return self._monotonic() < self._until

    def begin(self) -> bool:
        """Start the pause after a failure, and return whether it is the first in a row."""
        is_first = not self._pause_s
        self._pause_s = min(max(FIRST_S, 2 * self._pause_s), self._longest_s)
        self._until = self._monotonic() + self._pause_s
        return is_first

    def reset(self) -> None:
        self._pause_s = 0.0


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
