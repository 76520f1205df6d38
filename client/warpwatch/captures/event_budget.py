"""How many events a recorded step is expected to hold, so that the daemon can bound a capture.

What a step does is known without recording it: autograd numbers the operators that it may have to
differentiate, one counter a thread. A step's share of that counter, times the events that one
such operator brings to a trace, is the estimate; each capture corrects the factor.
"""

from __future__ import annotations

import sys
from typing import Any

# Events of a trace for each number of autograd's counter, before the first capture. Measured on the
# CPU with torch 2.13: 25 for a perceptron with SGD. On a GPU launches, kernels and their arrows
# come to them.
FACTOR_CPU = 25.0
FACTOR_CUDA = 40.0
# The counter is read at every so many looks for a command, more often at the first ones.
SAMPLE_LOOKS = 16


class EventBudget:
    """``look`` is for the training thread: the counter belongs to it.

    events_per_step: two significant digits, None when it is not known.
    """

    def __init__(self) -> None:
        self.events_per_step: int | None = None
        self._looks = self._next_look = 0
        self._factor: float | None = None
        self._measured: float | None = None
        self._rate = 0.0
        self._last: tuple[int, int] | None = None

    def look(self, number: int) -> None:
        """Step ``number`` is about to begin, and it is time to look for a command."""
        self._looks += 1
        if self._looks > self._next_look:
            self._next_look = self._looks + min(SAMPLE_LOOKS, self._looks // 2)
            self.sample(number)

    def sample(self, number: int) -> None:
        """Step ``number`` is about to begin."""
        counter = operators()
        if counter is None:
            return
        last, self._last = self._last, (number, counter)
        if last is not None and number > last[0] and counter >= last[1]:
            self._rate = (counter - last[1]) / (number - last[0])
            self._estimate()

    def learn(self, events: int, steps: int, counted: int) -> None:
        """A capture of ``steps`` had so many events; the counter rose by ``counted``."""
        self._measured = events / steps
        self._factor = events / counted if counted else None
        self._estimate()

    def _estimate(self) -> None:
        factor = self._factor or _default_factor()
        # Without gradients nothing is counted: what was measured holds.
        estimate = self._rate * factor or self._measured or 0.0
        self.events_per_step = int(float(f"{estimate:.1e}")) or None


def operators() -> int | None:
    """Autograd's counter of this thread; None where torch has none."""
    autograd: Any = getattr(sys.modules.get("torch"), "autograd", None)
    counter = getattr(autograd, "_get_sequence_nr", None)
    return None if counter is None else int(counter())


def _default_factor() -> float:
    cuda: Any = getattr(sys.modules.get("torch"), "cuda", None)
    return FACTOR_CUDA if cuda is not None and cuda.is_initialized() else FACTOR_CPU
