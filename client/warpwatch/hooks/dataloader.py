"""Hooks the DataLoader: waiting for it is ``data_wait``, and its batches are measured.

After training data the phase is ``forward`` up to backward. Data of an evaluation start the phase
``eval``: they are loaded without gradients, or repeatedly without a backward. If no optimizer step
can be seen, each batch that a backward followed is a step. A batch is measured by the shapes of its
tensors; no value is read.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import wraps
from itertools import islice
from threading import get_ident
from time import monotonic_ns
from types import ModuleType
from typing import Any

from warpwatch import faults
from warpwatch.hooks.hook_state import HookState
from warpwatch.monitor import Monitor
from warpwatch.step_times import LEAVE, OTHER

SOURCE = "dataloader"
MODULE = "torch.utils.data.dataloader"
# After this many batches with a backward but no optimizer step, batches are the clock. With
# gradient accumulation it is a multiple of the most batches that an optimizer step ever took.
LEAD_AFTER = 64
LEAD_AFTER_GAPS = 10
# Batches in a row that train nothing: some loops fetch one ahead.
EVALUATION_AFTER = 2

# The purposes of a batch. Batches of a nested loader, and training data of a process that is not a
# rank yet, are not timed.
_NOT_OURS, _UNTIMED, _TRAINING, _EVALUATION = range(4)
# The place of a weak reference to nothing: it returns None.
_NO_REFERENCE: Callable[[], Any] = type(None)


class LoaderHook:
    """The code around ``__next__`` of a DataLoader's iterator."""

    __slots__ = (
        "_backwards", "_data_wait", "_dimension", "_forward", "_given", "_given_before", "_inside",
        "_iterator", "_longest_gap", "_progress", "_sampler", "_size", "_state", "_updates",
        "_without_update",
    )  # fmt: skip

    def __init__(self, state: HookState) -> None:
        self._state = state
        self._data_wait = self._forward = 0  # the phases, once they are known
        self._inside = False
        self._iterator: Callable[[], Any] = _NO_REFERENCE  # a reference to the one asked last
        self._given = self._given_before = 0  # its batches, and of the one before
        self._sampler: Callable[[], Any] = _NO_REFERENCE  # of the last loader
        # The sampler's batch size, and the dimension of tensors that has it.
        self._size: int | None = None
        self._dimension: int | None = 0
        self._progress = 0  # backwards and optimizer steps when it was asked first
        self._backwards = 0
        self._updates = 0
        self._without_update = 0
        self._longest_gap = 0

    def before(self, iterator: Any) -> int:
        """Return the batch's purpose, or 0 to ignore it."""
        state = self._state
        monitor = state.monitor
        elsewhere = monitor is not None and get_ident() != monitor.clock.thread
        if self._inside or state.off or elsewhere:
            return _NOT_OURS
        purpose = _TRAINING
        try:
            if self._iterator() is not iterator:
                self._begin(iterator)
            used = state.backwards != self._backwards
            evaluates = state.evaluating
            if evaluates is None:
                unused = self._given >= EVALUATION_AFTER and not used and self._is_unused()
                evaluates = unused or not state.is_grad_enabled()
            if evaluates:
                purpose = _EVALUATION
                state.samples = state.tokens = 0
                state.switch("eval")
            elif monitor is None:
                purpose = _UNTIMED
            else:
                if used:
                    self._count_gap(monitor)
                if not self._data_wait:
                    self._data_wait = monitor.phases["data_wait"].index
                monitor.clock.push((self._data_wait, monotonic_ns(), None))
        except Exception as error:
            faults.swallow(error)
        self._inside = True
        return purpose

    def after(self, purpose: int, batch: Any) -> None:
        try:
            self._inside = False
            self._given += 1
            if purpose == _EVALUATION:
                return
            state, monitor = self._state, self._state.monitor
            # A background thread reads for a training that has begun meanwhile.
            if purpose == _UNTIMED and monitor is not None and not state.in_training_thread():
                return
            state.batches += 1
            samples, tokens = measure(batch, self._dimension or 0)
            if self._dimension is None:
                samples = self._choose_dimension(batch, samples)
            if self._given > EVALUATION_AFTER and state.evaluating is None:
                # Nothing was done with what the same loader gave before.
                state.samples, state.tokens = samples, tokens
            else:
                # Loaders asked in turn give one step's data.
                state.samples += samples
                state.tokens += tokens
            if monitor is None:
                state.loaded_by = get_ident()
            elif purpose == _TRAINING:
                if not self._forward:
                    self._forward = monitor.phases["forward"].index
                    state.pair_phases(forward=self._forward)
                monitor.clock.push((LEAVE, monotonic_ns(), self._forward))
        except Exception as error:
            faults.swallow(error)

    @faults.guarded
    def failed(self, purpose: int) -> None:
        """End the wait at the end of the data or at an error."""
        self._inside = False
        self._iterator = _NO_REFERENCE
        monitor = self._state.monitor
        if purpose == _TRAINING and monitor is not None:
            monitor.clock.push((LEAVE, monotonic_ns(), OTHER))
        elif purpose == _EVALUATION:
            self._state.switch("other")

    def restart(self, iterator: Any) -> None:
        """Start a new epoch, also if persistent workers reuse the iterator."""
        if self._iterator() is iterator:
            self._iterator = _NO_REFERENCE

    def _begin(self, iterator: Any) -> None:
        state, is_gone = self._state, self._iterator() is None
        sampler = getattr(iterator, "_index_sampler", None)
        if sampler is None or self._sampler() is not sampler:
            self._sampler = _reference(sampler)
            self._size = getattr(sampler, "batch_size", None)
            self._dimension = None if self._size else 0
        elif is_gone and self._given == 1 != self._given_before:
            # The loop's first batch was looked at: ``next(iter(loader))``.
            state.samples = state.tokens = 0
        self._iterator = weakref.ref(iterator)
        self._given_before, self._given = self._given, 0
        self._progress = state.backwards + state.updates

    def _choose_dimension(self, batch: Any, samples: int) -> int:
        """Return the batch's samples and find their dimension by the loader's batch size."""
        if samples == self._size:
            self._dimension = 0
        elif measure(batch, 1)[0] == self._size:
            samples, self._dimension = self._size or 0, 1
        return samples

    def _is_unused(self) -> bool:
        """Return whether the process trains, but not since the iterator's first batch."""
        state = self._state
        return state.backwards > 0 and state.backwards + state.updates == self._progress

    def _count_gap(self, monitor: Monitor) -> None:
        """Count a batch that a backward followed: a step, if nothing else ends one."""
        state = self._state
        self._backwards = state.backwards
        if state.updates != self._updates:
            self._updates = state.updates
            if self._without_update:
                self._longest_gap = max(self._longest_gap, self._without_update + 1)
                self._without_update = 0
            return
        self._without_update += 1
        enough = max(LEAD_AFTER, LEAD_AFTER_GAPS * self._longest_gap)
        if self._without_update < enough:
            return
        if monitor.step_clock != SOURCE:
            monitor.release("optimizer")
            if monitor.lead(SOURCE):
                monitor.clock.restart()
        else:
            state.end_step(SOURCE)


def _reference(sampler: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(sampler)
    except TypeError:
        return _NO_REFERENCE  # a list, or none


def install(module: ModuleType, state: HookState) -> None:
    iterators = module._BaseDataLoaderIter
    hook = LoaderHook(state)
    iterators.__next__ = _fetching(iterators.__next__, hook, state)
    module.DataLoader.__iter__ = _starting(module.DataLoader.__iter__, hook, state)


def _fetching(
    original: Callable[[Any], Any], hook: LoaderHook, state: HookState
) -> Callable[[Any], Any]:
    @wraps(original)
    def __next__(iterator: Any) -> Any:
        if state.compiles and state.is_compiling():
            return original(iterator)
        purpose = hook.before(iterator)
        if not purpose:
            return original(iterator)
        try:
            batch = original(iterator)
        except BaseException:
            hook.failed(purpose)
            raise
        hook.after(purpose, batch)
        return batch

    return __next__


def _starting(
    original: Callable[[Any], Any], hook: LoaderHook, state: HookState
) -> Callable[[Any], Any]:
    """Wrap ``__iter__``: starting the workers is waiting for data too."""

    @wraps(original)
    def __iter__(loader: Any) -> Any:
        if state.is_compiling():
            return original(loader)
        monitor = state.monitor
        if monitor is None:
            iterator = original(loader)
        else:
            trains = state.is_grad_enabled() and not state.evaluating
            with monitor.phase("data_wait" if trains else "eval"):
                iterator = original(loader)
        hook.restart(iterator)
        return iterator

    return __iter__


# A batch of a batch of a batch, and the items of each that are looked at.
MAX_DEPTH = 4
MAX_ITEMS = 8
TOKENS = "input_ids"
_TOKEN_TYPES = ("torch.int64", "torch.int32")
# Beside packed sequences: where each begins, one more than there are; how the tokens are numbered.
BOUNDARIES = ("cu_seq_lens_q", "cu_seqlens")
POSITIONS = "position_ids"


def measure(batch: Any, dimension: int = 0) -> tuple[int, int]:
    """Return (samples, tokens): the first tensor's length and the size of ``input_ids``.

    ``dimension`` of a tensor is the batch's; 1 if time comes first. Unknown counts are 0. Never
    raises.
    """
    try:
        # The fast path for most batches.
        first = batch[0] if batch.__class__ is list and batch else batch
        shape = getattr(first, "shape", None)
        if shape:
            samples = shape[dimension if len(shape) > 1 else 0]
            if samples.__class__ is int:
                return samples, _tokens(first, shape)
        return _measure(batch, 0, dimension) or (0, 0)
    except Exception as error:
        faults.swallow(error)
        return 0, 0


def _measure(batch: Any, depth: int, dimension: int = 0) -> tuple[int, int] | None:
    shape = getattr(batch, "shape", None)
    if shape is not None:
        found = _of_shape(shape[dimension:] if len(shape) > 1 else shape)
        return found and (found[0], _tokens(batch, shape))
    if isinstance(batch, (tuple, list)):
        items: Any = batch
    else:
        if isinstance(batch, (str, bytes)):
            return None
        # A dictionary, what behaves like one, or an object with tensors.
        fields = batch if hasattr(batch, "keys") else getattr(batch, "__dict__", None)
        if not fields:
            return None
        if TOKENS in fields:
            return _of_packed(fields, _of_tokens(fields[TOKENS]))
        items = fields.values()
    if depth < MAX_DEPTH:
        for item in islice(items, MAX_ITEMS):
            found = _measure(item, depth + 1, dimension)
            if found is not None:
                return found
    return None


def _tokens(tensor: Any, shape: Any) -> int:
    """Return the size of rows of 32- or 64-bit integers, which are token ids."""
    if len(shape) != 2 or shape[1].__class__ is not int:
        return 0
    kind = str(getattr(tensor, "dtype", ""))
    return shape[0] * shape[1] if kind in _TOKEN_TYPES else 0


def _of_shape(shape: Any) -> tuple[int, int] | None:
    return (shape[0], 0) if len(shape) and type(shape[0]) is int else None


def _of_packed(fields: Any, found: tuple[int, int] | None) -> tuple[int, int] | None:
    """Count the sequences of a packed row; 0 if only values tell how many there are."""
    for name in BOUNDARIES:
        shape = getattr(fields.get(name), "shape", None) if found else None
        if found and shape:
            return max(0, shape[0] - 1), found[1]
    if found and found[0] == 1 and POSITIONS in fields:
        return 0, found[1]
    return found


def _of_tokens(ids: Any) -> tuple[int, int] | None:
    shape = getattr(ids, "shape", None)
    if shape is None:
        return _measure(ids, MAX_DEPTH - 1)
    tokens = 1
    for length in shape:
        if type(length) is not int:
            return _of_shape(shape)
        tokens *= length
    return (shape[0], tokens) if len(shape) else None
