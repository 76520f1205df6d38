"""Chooses which of several optimizers ends the steps of the training.

Optimizers that step in turn at every step (the two of a GAN) share a step, which the first ends. An
optimizer that steps alone is the clock from its first step on if it is new or has had turns of its
own. Otherwise it becomes the clock once the other has not stepped for longer than ever before.
"""

from __future__ import annotations

from time import monotonic_ns
from typing import Any
from weakref import ref

from warpwatch.steps import StepClock

# This many steps in a row are a turn of its own: within a training step each steps once.
TURN_STEPS = 2
# Steps of another optimizer without a step of the clock's, until the number per training step is
# known. A GAN's critic takes five for one of the generator (Gulrajani et al. 2017).
TAKE_OVER_AFTER = 16
# After this time without a step of the clock's fewer steps suffice.
TAKE_OVER_NS = 10_000_000_000
# Removed optimizers are dropped once per this many new ones.
CLEAN_UP_AFTER = 64


class _Seen:
    """An optimizer that has stepped.

    ``count`` is its steps in ``round`` without one of the clock's; ``has_turns`` tells whether it
    has had turns of its own.
    """

    __slots__ = ("count", "has_turns", "optimizer", "round")

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = ref(optimizer)
        self.count = self.round = 0
        self.has_turns = False


class ClockChoice:
    """The choice, consulted only when another optimizer than the clock's has stepped.

    A round lasts until the clock's optimizer steps. ``_run`` is the most steps of another optimizer
    in this round, ``_most`` in any earlier one. ``_steps`` is the clock's steps when another one
    last stepped, ``_new_at`` when a new one came. If each training step has a new one
    (meta-learning), newness is ignored. With ``gives_back`` the previous clock led for a single
    step, which was part of the one that goes on (a critic's generator).
    """

    __slots__ = ("_most", "_new_at", "_round", "_run", "_seen", "_steps", "gives_back")

    def __init__(self) -> None:
        self._seen: dict[int, _Seen] = {}
        self._most = self._new_at = self._round = self._run = self._steps = 0
        self.gives_back = False

    def takes_over(self, optimizer: Any, current: Any, clock: StepClock) -> bool:
        """Return whether ``optimizer``, which has stepped, is the clock from this step on.

        With ``gives_back`` this step ends nothing: the previous clock's step counted instead.
        ``current`` is the clock's optimizer, None if it was deleted.
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
        """Return whether this is a turn: an optimizer with a single step gives the clock back."""
        return alone >= TURN_STEPS or current is None or not self._of(current).has_turns

    def _is_left(self, count: int, clock: StepClock) -> bool:
        """Return whether the clock's has not stepped for many steps or a long time."""
        return count >= TAKE_OVER_AFTER or monotonic_ns() - clock.begun_ns >= TAKE_OVER_NS
