"""Loops whose rounds a test runs by hand, in place of the daemon's supervisor and its threads."""

import threading
from collections.abc import Callable

from tests.manual_clock import ManualClock
from tests.waiting import DEADLINE_S


class HandLoop:
    def __init__(
        self, name: str, interval_s: float, step: Callable[[], None], clock: ManualClock
    ) -> None:
        self.name, self.interval_s = name, interval_s
        self.last_duration_s = 0.0
        self.stopped = False
        self._step, self._clock = step, clock
        self._begun: float | None = None
        self._thread: threading.Thread | None = None

    def step(self) -> None:
        self._begun = self._clock.monotonic()
        try:
            self._step()
        finally:
            self._begun = None

    def start(self) -> None:
        """Run a round that does not return before the test lets it."""
        self._thread = threading.Thread(target=self.step, daemon=True)
        self._thread.start()

    def join(self) -> None:
        if self._thread is not None:
            self._thread.join(DEADLINE_S)
            assert not self._thread.is_alive()

    @property
    def alive(self) -> bool:
        return self._begun is not None or not self.stopped

    @property
    def busy_s(self) -> float:
        begun = self._begun
        return 0.0 if begun is None else self._clock.monotonic() - begun

    @property
    def busy(self) -> bool:
        return self._begun is not None

    def wake(self) -> None:
        pass

    def stop(self, timeout_s: float = 0.0) -> None:
        self.stopped = True


class HandLoops:
    """``all``: every loop that was begun, the newest last."""

    def __init__(self, clock: ManualClock) -> None:
        self.all: list[HandLoop] = []
        self._clock = clock

    def every(self, name: str, interval_s: float, step: Callable[[], None]) -> HandLoop:
        self.all.append(HandLoop(name, interval_s, step, self._clock))
        return self.all[-1]

    def __getitem__(self, name: str) -> HandLoop:
        return next(loop for loop in reversed(self.all) if loop.name == name and not loop.stopped)

    @property
    def names(self) -> list[str]:
        return [loop.name for loop in self.all if not loop.stopped]

    def run(self, *names: str) -> None:
        for name in names:
            self[name].step()

    def round(self) -> None:
        """One round of every loop that runs and is not in a round already."""
        for loop in tuple(self.all):
            if not loop.stopped and not loop.busy:
                loop.step()

    def join(self) -> None:
        for loop in self.all:
            loop.join()
