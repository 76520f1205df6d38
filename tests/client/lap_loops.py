"""Steady training loops in which something else happens now and then, by a clock that ticks.

Each look at the clock is a tick, so that the times of a loop are the same in every run. With
``WITHOUT_LAPS`` in the environment each border is noted by itself.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

import warpwatch
from tests.client.interrupts import interrupted
from tests.client.loop_base import data, flow, loop, model
from tests.client.test_cuda_steps import SimulatedCuda
from warpwatch.cuda_steps import CudaSteps
from warpwatch.hooks.lap import NONE, TRAINED

STEPS = 12
TICK_NS = 1_000_000

Act = Callable[[int], object]


def _tick() -> Iterator[int]:
    now = 0
    while True:
        now += TICK_NS
        yield now


def _by_ticks() -> None:
    tick = _tick().__next__
    hooks = ("hooks.backward", "hooks.dataloader", "hooks.optimizer")
    for name in ("monitor", "steps", *hooks):
        module = sys.modules[f"warpwatch.{name}"]
        module.monotonic_ns = tick  # type: ignore[attr-defined]
    if "WITHOUT_LAPS" in os.environ:
        flow.lap.loader = None


def _nothing(step: int) -> None:
    return None


class Training:
    """A loop; what else happens when the batch is there, after backward and after the update."""

    def __init__(self) -> None:
        _by_ticks()
        self.net = model()
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.01)

    def run(
        self,
        fetched: Act = _nothing,
        trained: Act = _nothing,
        updated: Act = _nothing,
        batches: Iterable[Any] | None = None,
    ) -> int:
        """Laps that were run since they were left last."""
        for step, batch in enumerate(data(STEPS) if batches is None else batches):
            inputs = batch["x"] if isinstance(batch, dict) else batch[0]
            fetched(step)
            self.optimizer.zero_grad()
            self.net(inputs).sum().backward()
            trained(step)
            self.optimizer.step()
            updated(step)
        return flow.lap.count


def _at(wanted: int, act: Callable[[], object]) -> Act:
    return lambda step: act() if step == wanted else None


def _phase() -> None:
    assert flow.monitor is not None
    with flow.monitor.phase("mine"):
        pass


@loop
def undisturbed() -> int:
    return Training().run()


@loop
def two_epochs() -> int:
    training = Training()
    training.run()
    return training.run()


@loop
def batches_of_other_kinds() -> int:
    training = Training()
    rows = TensorDataset(torch.ones(STEPS * 4 - 1, 8))
    training.run(batches=DataLoader(rows, batch_size=4, collate_fn=lambda items: (_stack(items),)))
    return training.run(
        batches=DataLoader(rows, batch_size=4, collate_fn=lambda items: {"x": _stack(items)})
    )


def _stack(items: list[Any]) -> torch.Tensor:
    return torch.stack([item[0] for item in items])


@loop
def phases_of_the_programs_own() -> int:
    training = Training()
    training.run(fetched=_at(7, _phase))
    training.run(trained=_at(7, _phase))
    return training.run(updated=_at(7, _phase))


@loop
def inside_of_a_phase() -> int:
    training = Training()
    training.run()
    assert flow.monitor is not None
    with flow.monitor.phase("outer"):
        return training.run()


@loop
def evaluations() -> int:
    training = Training()

    def evaluate() -> None:
        with torch.no_grad():
            for (batch,) in data(2):
                training.net(batch)

    return training.run(updated=_at(6, evaluate))


@loop
def evaluations_of_the_training_data() -> int:
    training = Training()
    batches = iter(data(STEPS + 3))

    def evaluate() -> None:
        with torch.no_grad():
            for (batch,) in itertools.islice(batches, 3):
                training.net(batch)

    return training.run(updated=_at(6, evaluate), batches=batches)


@loop
def batches_of_single_numbers() -> int:
    training = Training()
    numbers = DataLoader(torch.arange(STEPS, dtype=torch.float32), batch_size=None)
    training.net = torch.nn.Linear(1, 1)
    training.optimizer = torch.optim.SGD(training.net.parameters(), lr=0.01)
    return training.run(batches=({"x": number.reshape(1)} for number in numbers))


@loop
def a_second_backward_now_and_then() -> int:
    training = Training()
    return training.run(trained=_at(6, lambda: training.net(torch.ones(4, 8)).sum().backward()))


@loop
def another_optimizer_now_and_then() -> int:
    training = Training()
    other = torch.optim.SGD(model().parameters(), lr=0.01)
    return training.run(trained=_at(6, other.step), updated=_at(8, other.step))


@loop
def a_closure_now_and_then() -> int:
    training = Training()

    def closure() -> Any:
        loss = training.net(torch.ones(4, 8)).sum()
        loss.backward()
        return loss

    return training.run(updated=_at(6, lambda: training.optimizer.step(closure)))


@loop
def data_that_fail() -> int:
    training = Training()

    class Failing(TensorDataset):  # type: ignore[misc]
        def __getitem__(self, index: int) -> Any:
            if index == 9 * 4:
                raise ZeroDivisionError
            return super().__getitem__(index)

    rows = Failing(torch.ones(STEPS * 4, 8))
    with contextlib.suppress(ZeroDivisionError):
        training.run(batches=DataLoader(rows, batch_size=4))
    return training.run()


@loop
def a_backward_and_an_update_that_fail() -> int:
    training = Training()

    def fail(*_: Any) -> None:
        raise ZeroDivisionError

    def failing_backward() -> None:
        loss = training.net(torch.ones(4, 8)).sum()
        loss.register_hook(fail)
        with contextlib.suppress(ZeroDivisionError):
            loss.backward()

    def failing_step() -> None:
        handle = training.optimizer.register_step_pre_hook(fail)
        with contextlib.suppress(ZeroDivisionError):
            training.optimizer.step()
        handle.remove()

    training.run(fetched=_at(6, failing_backward))
    return training.run(trained=_at(6, failing_step))


@loop
def saved_inside_of_backward() -> int:
    training = Training()

    def save(*_: Any) -> None:
        assert flow.monitor is not None
        with flow.monitor.phase("checkpoint"):
            pass

    def hooked(step: int) -> None:
        if step == 6:
            handle = training.net.weight.register_hook(save)
            training.net(torch.ones(4, 8)).sum().backward()
            handle.remove()

    return training.run(updated=hooked)


@loop
def steps_of_the_programs_own_from_some_step_on() -> int:
    training = Training()
    training.run()
    monitor = warpwatch.attach()
    with contextlib.ExitStack() as stack:

        def begin(_: int) -> None:
            stack.enter_context(monitor.step(samples=3))

        return training.run(fetched=begin, updated=lambda _: stack.close())


@loop
def a_framework_that_takes_over() -> int:
    training = Training()
    training.run(fetched=_at(8, lambda: flow.begin_training("lightning")))
    training.run(updated=lambda _: flow.end_step("lightning"))
    flow.end_training("lightning")
    return training.run()


@loop
def a_gpu_that_comes_into_use() -> int:
    training = Training()

    def use() -> None:
        assert flow.clock is not None
        flow.clock.use_gpu(CudaSteps(SimulatedCuda()))

    return training.run(updated=_at(6, use))


@loop
def a_log_that_somebody_else_has_taken() -> int:
    training = Training()

    def take() -> None:
        clock = flow.clock
        assert clock is not None
        clock.push = taken = _appending_to(clock.log)
        flow.lap.leave()
        assert clock.push is taken

    return training.run(fetched=_at(7, take))


def _appending_to(log: Any) -> Callable[[Any], None]:
    return lambda entry: log.extend(entry)


@loop
def another_thread_compiles() -> int:
    """``zero_grad`` is then the first hook that the training thread runs."""
    training = Training()

    def compiles() -> None:
        thread = threading.Thread(target=flow.compile)
        thread.start()
        thread.join()
        training.optimizer.zero_grad()
        assert flow.lap.stage == NONE

    return training.run(fetched=_at(7, compiles))


@loop
def batches_of_another_thread() -> int:
    """It has fetched some before the program is a rank; what it fetches then is no lap's batch."""
    training = Training()
    laps: list[int] = []
    with ThreadPoolExecutor(1) as thread:
        iterator = iter(data(STEPS))
        fetched = [thread.submit(next, iterator).result() for _ in range(4)]
        for _ in range(STEPS):
            fetched.append(thread.submit(next, iterator, None).result())
            (batch,) = fetched.pop(0)
            training.net(batch).sum().backward()
            laps.append(flow.lap.stage == TRAINED)
            training.optimizer.step()
    return sum(laps)


@loop
def interrupted_at_any_line_of_a_lap() -> list[int]:
    """Steps counted of the twelve after an interrupt, for each line that it hits."""
    training = Training()
    training.run()
    assert flow.monitor is not None
    clock = flow.monitor.clock
    functions = ("__next__", "backward", "before", "after")
    counted: list[int] = []
    while True:
        iterator = iter(data(STEPS + 9))
        for _ in range(8):
            _step(training, iterator)

        def one(iterator: Iterator[Any] = iterator) -> None:
            _step(training, iterator)

        if not interrupted(one, functions, len(counted)):
            return counted
        before = clock.steps
        for _ in range(STEPS):
            _step(training, iterator)
        counted.append(clock.steps - before)


def _step(training: Training, iterator: Iterator[Any]) -> None:
    (batch,) = next(iterator)
    training.net(batch).sum().backward()
    training.optimizer.step()
