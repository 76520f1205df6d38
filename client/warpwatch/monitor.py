"""The monitor: what the user's training loop holds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from threading import get_ident
from time import monotonic_ns
from types import TracebackType
from typing import Any, Generic, TypeVar

from warpwatch import faults
from warpwatch.step_times import LEAVE, OTHER, SWITCH
from warpwatch.steps import COUNT_BITS, StepClock, bounded_count

Item = TypeVar("Item")
# Who may set the step clock, the strongest first; every other name is a framework's callback.
_STRENGTH = {"step()": 3, "optimizer": 1, "dataloader": 0, "backward": -1, "": -2}
_FRAMEWORK = 2
# Phases that are no part of a step's normal work: a recording ends without a trace at them.
_INTERRUPTIONS = {"eval": "an evaluation began", "checkpoint": "a checkpoint began"}


class Phase:
    """A named part of the step, as a context manager that can be entered again and again.

    In other threads than the training's it does nothing. ``_elsewhere``: those that are inside.
    """

    __slots__ = ("_clock", "_elsewhere", "index")

    def __init__(self, clock: StepClock, index: int) -> None:
        self._clock = clock
        self._elsewhere: list[int] = []
        self.index = index

    def __enter__(self) -> Phase:
        clock = self._clock
        if get_ident() != clock.thread:
            self._elsewhere.append(get_ident())
            return self
        try:
            clock.push((self.index, monotonic_ns(), None))
            return self  # in here: an interrupt between the two is one, too
        except BaseException:
            # Interrupted: no one will leave what was not entered.
            clock.push((LEAVE, monotonic_ns(), None))
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # One call less than to ask for the thread here as well.
        if self._elsewhere and get_ident() != self._clock.thread:
            if get_ident() in self._elsewhere:
                self._elsewhere.remove(get_ident())
        else:
            self._clock.push((LEAVE, monotonic_ns(), None))


class _Interruption(Phase):
    """A phase that ends a capture's recording."""

    __slots__ = ("_reason",)

    def __init__(self, clock: StepClock, index: int, reason: str) -> None:
        super().__init__(clock, index)
        self._reason = reason

    def __enter__(self) -> Phase:
        self._clock.interrupt(self._reason)
        return super().__enter__()


class Phases(dict[str, Phase]):
    """All that were asked for, by name."""

    def __init__(self, clock: StepClock) -> None:
        super().__init__()
        self._clock = clock

    def __missing__(self, name: str) -> Phase:
        index = OTHER
        try:
            index = self._clock.phase_index(name)
        except Exception as error:
            faults.swallow(error)
        reason = _INTERRUPTIONS.get(name)
        phase = _Interruption(self._clock, index, reason) if reason else Phase(self._clock, index)
        if index != OTHER:
            self[name] = phase
        return phase


class _Waiting(Generic[Item]):
    """The iterator of a wrapped iterable. It keeps no item: a batch may be large."""

    __slots__ = ("_iterator", "_phase")

    def __init__(self, iterator: Iterator[Item], phase: Phase) -> None:
        self._iterator = iterator
        self._phase = phase

    def __iter__(self) -> Iterator[Item]:
        return self

    def __next__(self) -> Item:
        with self._phase:
            return next(self._iterator)


class Wrapped(Generic[Item]):
    """An iterable whose waiting is a phase. All else is the iterable's own."""

    def __init__(self, iterable: Iterable[Item], phase: Phase) -> None:
        self._iterable = iterable
        self._phase = phase

    def __iter__(self) -> Iterator[Item]:
        with self._phase:
            return _Waiting(iter(self._iterable), self._phase)

    def __next__(self) -> Item:
        """For what is an iterator itself."""
        with self._phase:
            return next(self._iterable)  # type: ignore[call-overload, no-any-return]

    def __len__(self) -> int:
        return len(self._iterable)  # type: ignore[arg-type]

    def __bool__(self) -> bool:
        return bool(self._iterable)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._iterable, name)


class Monitor:
    """Steps and phases of this process. Without a daemon every call costs next to nothing.

    Steps belong to the first thread that begins one, as long as it lives and trains; calls from
    other threads are not measured.
    ``step_clock``: who sets the steps: ``step()``, a framework, ``optimizer``, ``dataloader``,
    ``backward``. ``model``: what the optimizers say of it, for the ring's metadata.
    """

    __slots__ = ("clock", "model", "phases", "step_clock")

    def __init__(self, clock: StepClock) -> None:
        self.clock = clock
        self.step_clock = ""
        self.model: dict[str, Any] = {}
        self.phases = Phases(clock)

    def step(self, samples: int = 0, tokens: int = 0) -> StepClock:
        """One optimizer step: ``with monitor.step(samples=32) as step``.

        ``step.count(tokens=n)`` adds what is known only later. A step that an exception leaves is
        not counted.
        """
        clock = self.clock
        if type(samples) is not int or type(tokens) is not int or (samples | tokens) >> COUNT_BITS:
            samples, tokens = bounded_count(samples), bounded_count(tokens)
        if self.step_clock != "step()":
            self.lead("step()")
        if not clock.open:
            clock.samples = samples
            clock.tokens = tokens
        return clock

    def phase(self, name: str) -> Phase:
        """A part of the step: ``data_wait``, ``forward``, ``comm``, … or one of your own (16)."""
        return self.phases[name]

    def wrap(self, iterable: Iterable[Item], phase: str = "data_wait") -> Wrapped[Item]:
        """The same iterable; the time spent waiting for its items is a phase."""
        return Wrapped(iterable, self.phases[phase])

    def lead(self, source: str) -> bool:
        """Whether ``source`` sets the step clock from now on: nothing as strong does so already.

        The user's own steps win over a framework, that over the optimizer, and it over the
        DataLoader. The step that a weaker one has begun is not counted; one that training has
        begun before anything set the clock is, unless the steps are the user's own.
        """
        if source == self.step_clock:
            return True
        if _strength(source) <= _strength(self.step_clock):
            return False
        if self.step_clock or source == "step()":
            self.clock.open = False
        self.step_clock = source
        return True

    def release(self, source: str) -> None:
        """``source`` sets the step clock no more: its training has ended, another may follow."""
        if source == self.step_clock:
            self.step_clock = ""
            self.clock.open = False

    def switch(self, phase: str) -> None:
        """What runs between phases is ``phase`` from now on, ``other`` by default."""
        if phase in _INTERRUPTIONS:
            self.clock.interrupt(_INTERRUPTIONS[phase])
        clock = self.clock
        if get_ident() == clock.thread:
            index = OTHER if phase == "other" else self.phases[phase].index
            clock.push((SWITCH, monotonic_ns(), index))


def _strength(source: str) -> int:
    return _STRENGTH.get(source, _FRAMEWORK)
