"""Waiting for the DataLoader is the phase ``data_wait``; its batches are the last resort as clock.

After training data the phase is ``forward`` up to backward. Data of an evaluation begins the phase
``eval``: it is fetched without gradients, or again and again without a backward. Where no
optimizer's step can be seen, each batch that a backward followed is a step.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import wraps
from threading import get_ident
from time import monotonic_ns
from types import ModuleType
from typing import Any

from warpwatch import faults
from warpwatch.columns import ASKED, GIVEN, SAMPLES, TOKENS
from warpwatch.hooks.batches import measure
from warpwatch.hooks.hook_state import Flow
from warpwatch.hooks.lap import BEGUN, FETCHED, FETCHING
from warpwatch.monitor import Phase
from warpwatch.phase_times import LEAVE, OTHER
from warpwatch.steps import StepClock

SOURCE = "dataloader"
MODULE = "torch.utils.data.dataloader"
# Batches with a backward and without a step of an optimizer, after which they are the clock. Where
# gradients are accumulated: so many times the most batches that a step of an optimizer ever took.
LEAD_AFTER = 64
LEAD_AFTER_GAPS = 10
# Batches in a row that train nothing: some loops fetch one ahead.
EVALUATION_AFTER = 2

_NOT_OURS, _TRAINING, _EVALUATION = range(3)


class LoaderHook:
    """What surrounds ``__next__`` of a DataLoader's iterator."""

    __slots__ = (
        "_backwards", "_flow", "_given", "_iterator", "_longest_gap", "_progress", "_updates",
        "_waiting", "_without_update", "forward_phase", "inside", "steady", "waiting_phase",
    )  # fmt: skip

    def __init__(self, flow: Flow) -> None:
        self._flow = flow
        self.inside = False
        self.waiting_phase = self.forward_phase = OTHER
        self._waiting: Phase | None = None
        self._iterator: Callable[[], Any] = _nothing  # a reference to the one asked last
        self.steady: Callable[[], Any] = _nothing  # the same, after its first batches
        self._given = 0  # its batches
        self._progress = 0  # backwards and optimizer steps when it was asked first
        self._backwards = 0
        self._updates = 0
        self._without_update = 0
        self._longest_gap = 0

    def ask(self, clock: StepClock, now: int) -> None:
        """The next batch is asked for in a step of a known order."""
        self._flow.turned = None
        self.inside = True
        clock.push((self.waiting_phase, now, None))

    def take(self, clock: StepClock, now: int, samples: int, tokens: int) -> None:
        flow = self._flow
        self.inside = False
        flow.batches += 1
        flow.samples, flow.tokens = samples, tokens
        clock.push((LEAVE, now, self.forward_phase))

    def lose(self, clock: StepClock, now: int) -> None:
        """There was none, or an error."""
        clock.push((LEAVE, now, OTHER))
        self.end()

    def before(self, iterator: Any) -> int:
        """What the batch is for. The iterator of a dataset that itself loads is not ours."""
        flow = self._flow
        if self.inside or (flow.monitor is not None and not flow.here()):
            return _NOT_OURS
        self.inside = True
        try:
            flow.turned = None
            if self._evaluates(iterator):
                flow.samples = flow.tokens = 0
                flow.switch("eval")
                return _EVALUATION
            if flow.monitor is not None:
                if flow.backwards != self._backwards:
                    self._used()
                self._waiting = flow.monitor.phase("data_wait").__enter__()
                self.waiting_phase = self._waiting.index
                self.forward_phase = flow.monitor.phase("forward").index
        except Exception as error:
            faults.swallow(error)
        return _TRAINING

    def after(self, purpose: int, iterator: Any, batch: Any) -> None:
        try:
            self.inside = False
            self._given += 1
            if purpose == _TRAINING:
                flow = self._flow
                flow.batches += 1
                samples, tokens = measure(batch)
                # Loaders asked in turn give one step's data; the same one again has replaced what
                # nothing was done with.
                again = self._given > EVALUATION_AFTER
                if again:
                    self.steady = self._iterator
                unused = again and flow.evaluating is None
                flow.samples = samples if unused else flow.samples + samples
                flow.tokens = tokens if unused else flow.tokens + tokens
                self._leave("forward")
        except Exception as error:
            faults.swallow(error)

    def failed(self, purpose: int) -> None:
        """The end of the data, or an error."""
        try:
            self.end()
            if purpose == _TRAINING:
                self._leave("other")
            else:
                self._flow.switch("other")
        except Exception as error:
            faults.swallow(error)

    def end(self) -> None:
        self.inside = False
        self._iterator = self.steady = _nothing

    def _leave(self, ambient: str) -> None:
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            # In this order the one look at the clock is the phase's.
            self._flow.switch(ambient)
            waiting.__exit__(None, None, None)

    def _evaluates(self, iterator: Any) -> bool:
        flow = self._flow
        progress = flow.backwards + flow.updates
        if self._iterator() is not iterator:
            self._iterator = weakref.ref(iterator)
            self.steady = _nothing
            self._given = 0
            self._progress = progress
        if flow.evaluating is not None:
            return flow.evaluating
        if not flow.is_grad_enabled():
            return True
        unused = self._given >= EVALUATION_AFTER and progress == self._progress
        return unused and flow.backwards > 0

    def _used(self) -> None:
        """A backward ran since the last batch for training: where nobody else can tell, a step."""
        flow = self._flow
        self._backwards = flow.backwards
        if flow.updates != self._updates:
            self._updates = flow.updates
            self._longest_gap = max(self._longest_gap, self._without_update + 1)
            self._without_update = 0
            return
        self._without_update += 1
        monitor = flow.monitor
        enough = max(LEAD_AFTER, LEAD_AFTER_GAPS * self._longest_gap)
        if self._without_update < enough or monitor is None:
            return
        if monitor.step_clock != SOURCE:
            monitor.release("optimizer")
            if monitor.lead(SOURCE):
                monitor.clock.restart()
        else:
            flow.end_step(SOURCE)


def _nothing() -> None:
    return None


def install(module: ModuleType, flow: Flow) -> None:
    iterators = module._BaseDataLoaderIter
    iterators.__next__ = _fetching(iterators.__next__, flow)
    module.DataLoader.__iter__ = _starting(module.DataLoader.__iter__, flow)


def _fetching(original: Callable[[Any], Any], flow: Flow) -> Callable[[Any], Any]:
    hook = LoaderHook(flow)
    outside_of_laps = _fetching_outside_of_laps(original, hook, flow)
    lap = flow.lap
    lap.loader = hook
    noted = lap.noted

    @wraps(original)
    def __next__(iterator: Any) -> Any:
        if lap.stage != BEGUN:
            return outside_of_laps(iterator)
        steady = lap.iterator
        if steady() is not iterator or get_ident() != lap.thread:
            return outside_of_laps(iterator)
        noted[ASKED] = monotonic_ns()
        lap.stage = FETCHING
        try:
            batch = original(iterator)
            # What most batches are: a call costs more than to look here.
            first: Any = batch[0] if type(batch) is list and batch else batch
            try:
                if type(first) is lap.tensor:
                    length = lap.length
                    noted[SAMPLES], noted[TOKENS] = length(first), 0
                else:
                    noted[SAMPLES], noted[TOKENS] = measure(batch)
            except Exception:
                noted[SAMPLES], noted[TOKENS] = measure(batch)
            now = monotonic_ns()
            if lap.stage == FETCHING:
                noted[GIVEN] = now
                lap.stage = FETCHED
            else:
                hook.take(lap.clock, now, noted[SAMPLES], noted[TOKENS])
            return batch
        except BaseException:
            lap.leave()
            hook.lose(lap.clock, monotonic_ns())
            raise

    return __next__


def _fetching_outside_of_laps(
    original: Callable[[Any], Any], hook: LoaderHook, flow: Flow
) -> Callable[[Any], Any]:
    any_other = _fetching_any(original, hook, flow)
    lap = flow.lap

    def fetch(iterator: Any) -> Any:
        if flow.compiles and flow.is_compiling():
            return original(iterator)
        if lap.stage == FETCHED and not flow.is_grad_enabled():
            lap.evaluate()
        lap.leave()
        clock = flow.turned
        if (
            clock is None
            or hook.steady() is not iterator
            or get_ident() != clock.thread
            or not flow.is_grad_enabled()
        ):
            return any_other(iterator)
        hook.ask(clock, monotonic_ns())
        try:
            batch = original(iterator)
        except BaseException:
            hook.lose(clock, monotonic_ns())
            raise
        samples, tokens = measure(batch)
        hook.take(clock, monotonic_ns(), samples, tokens)
        return batch

    return fetch


def _fetching_any(
    original: Callable[[Any], Any], hook: LoaderHook, flow: Flow
) -> Callable[[Any], Any]:
    def fetch(iterator: Any) -> Any:
        purpose = _NOT_OURS if flow.off else hook.before(iterator)
        if purpose == _NOT_OURS:
            return original(iterator)
        try:
            batch = original(iterator)
        except BaseException:
            hook.failed(purpose)
            raise
        hook.after(purpose, iterator, batch)
        return batch

    return fetch


def _starting(original: Callable[[Any], Any], flow: Flow) -> Callable[[Any], Any]:
    """Starting the workers is waiting for data too."""

    @wraps(original)
    def __iter__(loader: Any) -> Any:
        monitor = flow.monitor
        if monitor is None or flow.is_compiling():
            return original(loader)
        trains = flow.is_grad_enabled() and not flow.evaluating
        with monitor.phase("data_wait" if trains else "eval"):
            return original(loader)

    return __iter__
