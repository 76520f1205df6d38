"""Which of several optimizers ends the steps of the training.

Those that step in turn at every step of it (the two of a GAN) are one step, which the first ends.
One that steps on its own is the clock from its first step on where that can be known: it was not
there at the steps before, or has had turns of its own. Else it becomes the clock once the other has
not stepped for longer than it ever did.
"""

from __future__ import annotations

from time import monotonic_ns
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from warpwatch.steps import StepClock

# Steps in a row that are a turn of one's own: those of one training step are one each.
TURN_STEPS = 2
# Of another optimizer without one of the clock's, before it is known how many there are in a step
# of the training: a GAN's critic takes five for one of the generator (Gulrajani et al. 2017).
TAKE_OVER_AFTER = 16
# So many are not waited for where the clock's has not stepped for so long.
TAKE_OVER_NS = 10_000_000_000


class ClockChoice:
    """Asked only when another optimizer than the clock's has stepped.

    counts: the steps of each that was seen since the clock's last one; most: how many there ever
    were between two of the clock's. turners: those that have had turns of their own. steps: the
    clock's when another one stepped last; new_at: when one came that was not seen before. Where
    each step of the training has a new one (inner loops of meta-learning) that says nothing.
    """

    __slots__ = ("_counts", "_most", "_new_at", "_steps", "_turners")

    def __init__(self) -> None:
        self._counts: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._turners: WeakSet[Any] = WeakSet()
        self._most = self._steps = self._new_at = 0

    def takes_over(self, optimizer: Any, current: Any, clock: StepClock) -> bool:
        """Whether ``optimizer``, which has stepped, is the clock from this step on.

        current: whose steps are the clock, None where it is gone.
        """
        alone, self._steps = clock.steps - self._steps, clock.steps
        counts = self._counts
        if alone:
            self._most = max(self._most, *counts.values(), 0)
            counts.update(dict.fromkeys(counts, 0))
        if current is not None and alone >= TURN_STEPS:
            self._turners.add(current)
        if optimizer in counts:
            is_turn = self._is_turn(optimizer, current, alone)
        else:
            is_turn = clock.steps - self._new_at >= TURN_STEPS
            self._new_at = clock.steps
        counts[optimizer] = counts.get(optimizer, 0) + 1
        if current is not None and not is_turn and not self._is_left(counts[optimizer], clock):
            return False
        self._most = counts[optimizer] = 0
        return True

    def _is_turn(self, optimizer: Any, current: Any, alone: int) -> bool:
        """Of one that was seen before. One that took the clock for a single step gives it back."""
        has_turns = optimizer in self._turners
        return has_turns and (alone >= TURN_STEPS or current not in self._turners)

    def _is_left(self, count: int, clock: StepClock) -> bool:
        """Whether the clock's has not stepped for longer than it ever did."""
        is_late = monotonic_ns() - clock.begun_ns >= TAKE_OVER_NS
        return count >= max(2 * self._most + 2, 0 if is_late else TAKE_OVER_AFTER)
