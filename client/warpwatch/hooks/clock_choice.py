"""Which of several optimizers ends the steps of the training.

Those that step in turn at every step of it (the two of a GAN) are one step, which the first ends.
One that steps on its own is the clock from its first step on where that can be known: it was not
there at the steps before, or has had turns of its own. Else it becomes the clock once the other has
not stepped for longer than it ever did.
"""

from __future__ import annotations

from time import monotonic_ns
from typing import Any
from weakref import ref

from warpwatch.steps import StepClock

# Steps in a row that are a turn of one's own: those of one training step are one each.
TURN_STEPS = 2
# Of another optimizer without one of the clock's, before it is known how many there are in a step
# of the training: a GAN's critic takes five for one of the generator (Gulrajani et al. 2017).
TAKE_OVER_AFTER = 16
# So many are not waited for where the clock's has not stepped for so long.
TAKE_OVER_NS = 10_000_000_000
# So many new ones come between two looks at which are gone.
CLEAN_UP_AFTER = 64


class _Seen:
    """An optimizer that has stepped. ``count``: in ``round``, its steps without one of the clock's.

    has_turns: it has had turns of its own.
    """

    __slots__ = ("count", "has_turns", "optimizer", "round")

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = ref(optimizer)
        self.count = self.round = 0
        self.has_turns = False


class ClockChoice:
    """Asked only when another optimizer than the clock's has stepped, at each step of a GAN.

    seen: by the optimizer's id. A round lasts until the clock's steps; run: the most steps of
    another one in this round; most: in any before. steps: the clock's when another one stepped
    last; new_at: when one came that was not seen before. Where each step of the training has a new
    one (inner loops of meta-learning) that says nothing. gives_back: whether the clock before was
    that for a single step, which then was a part of the one that goes on (a critic's generator).
    """

    __slots__ = ("_most", "_new_at", "_round", "_run", "_seen", "_steps", "gives_back")

    def __init__(self) -> None:
        self._seen: dict[int, _Seen] = {}
        self._most = self._new_at = self._round = self._run = self._steps = 0
        self.gives_back = False

    def takes_over(self, optimizer: Any, current: Any, clock: StepClock) -> bool:
        """Whether ``optimizer``, which has stepped, is the clock from this step on. With
        ``gives_back`` this step ends nothing: that of the one before has counted in its place.

        current: whose steps are the clock, None where it is gone.
        """
        steps, alone = clock.steps, clock.steps - self._steps
        if alone:
            self._steps = steps
            self._round += 1
            if self._run > self._most:
                self._most = self._run
            self._run = 0
        if alone >= TURN_STEPS and current is not None:
            self._of(current).has_turns = True
        seen = self._seen.get(id(optimizer))
        if seen is None or seen.optimizer() is not optimizer:
            seen = self._of(optimizer)
            is_turn, self._new_at = steps - self._new_at >= TURN_STEPS, steps
            gives_back = False
        else:
            is_turn = seen.has_turns and self._is_turn(current, alone)
            gives_back = is_turn and alone == 1 and current is not None
        seen.count = seen.count + 1 if seen.round == self._round else 1
        seen.round = self._round
        if seen.count > self._run:
            self._run = seen.count
        is_left = seen.count >= 2 * self._most + 2 and self._is_left(seen.count, clock)
        if current is not None and not is_turn and not is_left:
            return False
        self._most = self._run = seen.count = 0
        self.gives_back = gives_back
        return True

    def _of(self, optimizer: Any) -> _Seen:
        seen = self._seen.get(id(optimizer))
        if seen is None or seen.optimizer() is not optimizer:
            if len(self._seen) % CLEAN_UP_AFTER == 0:
                lives = {key: one for key, one in self._seen.items() if one.optimizer() is not None}
                self._seen = lives
            seen = self._seen[id(optimizer)] = _Seen(optimizer)
        return seen

    def _is_turn(self, current: Any, alone: int) -> bool:
        """One that took the clock for a single step gives it back."""
        return alone >= TURN_STEPS or current is None or not self._of(current).has_turns

    def _is_left(self, count: int, clock: StepClock) -> bool:
        """Whether the clock's has not stepped for long, as steps or as time go."""
        return count >= TAKE_OVER_AFTER or monotonic_ns() - clock.begun_ns >= TAKE_OVER_NS
