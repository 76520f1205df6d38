"""A lap: a step of a steady loop, of which nothing is kept but the times of its borders.

Batch, backward, update, in this order and nothing else between, and what was asked at the begin of
the laps holds all the while: then a hook asks a single object and notes a time, and the clock takes
over many such steps at once. Whatever else happens ends the laps: the clock's ``push`` is theirs
meanwhile, and all other paths of the hooks begin with ``leave``, or ``push``. What the running lap
has noted is then done again by what hooks call at steps that are no laps, each border with its own
time, so that counts and phases are the same as without.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import get_ident
from typing import TYPE_CHECKING, Any

from warpwatch.columns import ASKED, LAP_LENGTH
from warpwatch.monitor import Monitor
from warpwatch.phase_times import SWITCH, Entry
from warpwatch.steps import StepClock

if TYPE_CHECKING:
    from warpwatch.hooks.dataloader import LoaderHook
    from warpwatch.hooks.hook_state import Flow
    from warpwatch.hooks.optimizer import OptimizerHooks

# How far the running lap has come; NONE: no laps are run.
NONE, BEGUN, FETCHING, FETCHED, IN_BACKWARD, TRAINED, UPDATING = range(7)
# Autograd's answer where no backward runs.
NO_GRAPH = -1
# Steps until laps are tried again where none can be run, or not one has come to its end.
RETRY_AFTER = 100


class Lap:
    """One a process. Hooks of the training thread read and write its stage and what is noted.

    noted: what columns.py says of a lap, up to the stage. log: takes it at the lap's end.
    count: laps that were run until they were left last.
    """

    __slots__ = (
        "_first", "_flow", "_laps", "_push", "_retry_in", "clock", "count", "iterator", "length",
        "loader", "log", "monitor", "noted", "optimizer", "optimizers", "stage", "tensor", "thread",
    )  # fmt: skip

    clock: StepClock
    monitor: Monitor
    tensor: Any
    length: Callable[[Any], int]
    iterator: Callable[[], Any]
    optimizer: Callable[[], Any]

    def __init__(self, flow: Flow) -> None:
        self._flow = flow
        self.loader: LoaderHook | None = None
        self.optimizers: OptimizerHooks | None = None
        self.stage = NONE
        self.thread = 0
        self.noted = [0] * LAP_LENGTH
        self._laps: list[int] = []
        self.log = self._laps.extend
        self.count = self._first = self._retry_in = 0

    def begin(self, monitor: Monitor, optimizer: Callable[[], Any]) -> None:
        """Laps are run from this end of a step on, where they can be.

        ``optimizer``: a reference to the one that has stepped alone.
        """
        self._retry_in -= 1
        flow, loader, optimizers, clock = self._flow, self.loader, self.optimizers, monitor.clock
        if self._retry_in > 0 or loader is None or optimizers is None or loader.steady() is None:
            return
        if flow.compiles or clock.cuda is not None or clock.gpu is not None or clock.capturing:
            return
        self.monitor, self.clock, self.thread = monitor, clock, clock.thread
        self.tensor, self.length = flow.tensor, flow.tensor_length
        self.iterator, self.optimizer = loader.steady, optimizer
        waiting, forward = loader.waiting_phase, loader.forward_phase
        phases = waiting, forward, flow.backward_phase, optimizers.alone_phase
        if not clock.run_laps(self._laps, phases):
            # To ask settles the log: not at every step.
            self._retry_in = RETRY_AFTER
            return
        self._first = clock.steps
        self._push = clock.push
        clock.push = self._interject
        self.stage = BEGUN

    def leave(self) -> None:
        """Back to steps of any kind, if this is the training thread."""
        if self.stage != NONE and get_ident() == self.clock.thread:
            self.drop()

    def evaluate(self) -> None:
        """``leave`` where the batch that the lap has fetched was evaluated, as the next one is."""
        if get_ident() == self.clock.thread and self.stage == FETCHED:
            self.stage = BEGUN
            self.drop()
            self.clock.push((SWITCH, self.noted[ASKED], self.monitor.phase("eval").index))

    def forbid(self) -> None:
        """From any thread: the training thread leaves at its next hook, if not now."""
        self.leave()
        self.thread = 0

    def drop(self) -> None:
        """``leave`` in a thread for which the training thread waits."""
        stage, self.stage = self.stage, NONE
        loader, optimizers = self.loader, self.optimizers
        if stage == NONE or loader is None or optimizers is None:
            return
        flow, clock = self._flow, self.clock
        self.count = count = clock.steps - self._first
        self._retry_in = 0 if count else RETRY_AFTER
        # What somebody else has put in its place since is not ours to take away.
        if clock.push == self._interject:
            clock.push = self._push
        if count:
            flow.batches += count
            flow.backwards += count
            flow.updates += count
            flow.samples = flow.tokens = 0
        optimizers.counted = flow.backwards + flow.batches
        flow.turned = clock
        asked_ns, given_ns, samples, tokens, called_ns, returned_ns, updated_ns, _ = self.noted
        if stage == IN_BACKWARD and flow.graph_task() == NO_GRAPH:
            # It has been interrupted as it returned.
            stage, returned_ns = TRAINED, called_ns
        if stage >= FETCHING:
            loader.ask(clock, asked_ns)
        if stage >= FETCHED:
            loader.take(clock, given_ns, samples, tokens)
        if stage >= IN_BACKWARD:
            flow.enter_backward(clock, called_ns)
        if stage >= TRAINED:
            flow.leave_backward(clock, returned_ns)
        if stage >= UPDATING:
            optimizers.step_alone(clock, updated_ns)

    def _interject(self, entry: Entry) -> None:
        """Somebody else has something to tell the clock."""
        self.drop()
        self._push(entry)
