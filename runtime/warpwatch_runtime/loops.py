"""What a source needs of whoever runs its loops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class Loop(Protocol):
    """A piece of work that is repeated in a thread of its own."""

    interval_s: float
    last_duration_s: float

    @property
    def alive(self) -> bool: ...

    @property
    def busy_s(self) -> float:
        """Seconds that the running round has taken so far; 0 between rounds."""

    def wake(self) -> None:
        """Run the next round now instead of at its time."""

    def stop(self, timeout_s: float = 0.0) -> None: ...


class Supervisor(Protocol):
    """Owns all loops, their threads and their exceptions."""

    def every(self, name: str, interval_s: float, step: Callable[[], None]) -> Loop: ...
