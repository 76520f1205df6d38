"""The monitor, with which a training loop reports steps and phases."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from threading import get_ident
from time import monotonic_ns
from typing import Any, Generic, TypeVar

from warpwatch import faults
from warpwatch.iterations import IterationClock
from warpwatch.step_times import LEAVE, OTHER, SWITCH
from warpwatch.steps import COUNT_BITS, StepClock, bounded_count

Item = TypeVar("Item")
# The sources of the step clock, the strongest first; all other names are frameworks.
_STRENGTH = {"iteration()": 4, "step()": 3, "optimizer": 1, "dataloader": 0, "backward": -1, "": -2}
_FRAMEWORK = 2
# A recording ends without a trace at these phases, which are not a step's normal work.
_INTERRUPTIONS = {"eval": "an evaluation began", "checkpoint": "a checkpoint began"}


class Phase:
    """A named part of the step, as a context manager that can be entered again and again.

    It does nothing in other threads than the training thread; ``_elsewhere`` lists those inside.
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
            # After an interrupt nobody leaves the phase, because it was not entered.
            clock.push((LEAVE, monotonic_ns(), None))
            raise

    def __exit__(self, *raised: Any) -> None:
        # This saves a call of get_ident in the training thread.
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
    """The phases in use, by name."""

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
        """Return the next item, if the iterable is an iterator itself."""
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
    """The steps and phases of this process. Without a daemon every call is nearly free.

    Steps belong to the first thread that begins one, as long as it lives and trains; calls from
    other threads are not measured.
    ``step_clock`` is the source of steps: ``step()``, a framework, ``optimizer``, ``dataloader``,
    ``backward`` or ``iteration()``. ``model`` is metadata of the model for the ring, ``place`` that
    of a server's process, which replaces what the environment says: job, rank, role and the like.
    ``serving`` are the counts of a server, None in a training.
    """

    __slots__ = ("clock", "model", "phases", "place", "serving", "step_clock")

    def __init__(self, clock: StepClock) -> None:
        self.clock = clock
        self.step_clock = ""
        self.model: dict[str, Any] = {}
        self.place: dict[str, Any] = {}
        self.serving = clock.serving if isinstance(clock, IterationClock) else None
        self.phases = Phases(clock)

    def step(self, samples: int = 0, tokens: int = 0) -> StepClock:
        """Return one optimizer step as a context: ``with monitor.step(samples=32) as step``.

        ``step.count(tokens=n)`` adds counts that are known later. A step that raises is not
        counted.
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

    def iteration(
        self,
        prefill_tokens: int = 0,
        decode_requests: int = 0,
        kv_tokens: int = 0,
        after_idle: bool | None = None,
    ) -> StepClock:
        """Return one pass of a server's engine as a context; ``attach(kind="serve")`` comes first.

        ``prefill_tokens``: prompt tokens computed in it. ``decode_requests``: requests that get a
        further token. ``kv_tokens``: in the KV cache of all its requests. ``after_idle``: whether
        none of its requests was in flight before; by default, whether it decodes none.
        """
        clock = self.clock
        if self.step_clock != "iteration()":
            self.lead("iteration()")
        if not clock.open:
            prefill, decode = bounded_count(prefill_tokens), bounded_count(decode_requests)
            clock.work = prefill, decode, bounded_count(kv_tokens)
            clock.samples, clock.tokens = 0, prefill + decode
            if isinstance(clock, IterationClock):
                clock.after_idle = not decode if after_idle is None else after_idle
        return clock

    def phase(self, name: str) -> Phase:
        """Return a part of the step: ``data_wait``, … or one of your own (16 in all)."""
        return self.phases[name]

    def wrap(self, iterable: Iterable[Item], phase: str = "data_wait") -> Wrapped[Item]:
        """Return the same iterable; waiting for its items is a phase."""
        return Wrapped(iterable, self.phases[phase])

    def lead(self, source: str) -> bool:
        """Let ``source`` set the step clock unless a source as strong does; return if it does.

        The user's own steps win over a framework, that over the optimizer, and it over the
        DataLoader. The step that a weaker one has begun is not counted; one that training has
        begun before anything set the clock is, unless the steps are the user's own. A source in
        another thread than the one that trains does not win.
        """
        if source == self.step_clock:
            return True
        if _strength(source) <= _strength(self.step_clock) or self.clock.is_elsewhere():
            return False
        if self.step_clock or source == "step()":
            self.clock.open = False
        self.step_clock = source
        return True

    def release(self, source: str) -> None:
        """Take the step clock from ``source``: its training has ended, another may follow."""
        if source == self.step_clock:
            self.step_clock = ""
            self.clock.open = False

    def switch(self, phase: str) -> None:
        """Attribute the time between phases to ``phase`` from now on; ``other`` is the default."""
        if phase in _INTERRUPTIONS:
            self.clock.interrupt(_INTERRUPTIONS[phase])
        clock = self.clock
        if get_ident() == clock.thread:
            index = OTHER if phase == "other" else self.phases[phase].index
            clock.push((SWITCH, monotonic_ns(), index))


def _strength(source: str) -> int:
    return _STRENGTH.get(source, _FRAMEWORK)
