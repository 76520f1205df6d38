"""Training loops that know nothing of the hooks: their optimizers, and the parts of their steps."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import os
import sys
import threading
import time
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

import warpwatch
from tests.client.interrupts import interrupted
from tests.client.loop_base import SLEEP_S, backward, data, loop, model, state
from tests.client.simulated_cuda import SimulatedCuda

# --- the optimizer as clock -----------------------------------------------------------------------


@loop
def plain() -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    for (batch,) in data(5):
        net(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def by_hand(net: torch.nn.Module, steps: int) -> None:
    """Neither an optimizer nor a DataLoader."""
    for _ in range(steps):
        net.zero_grad()
        backward(net)
        with torch.no_grad():
            for parameter in net.parameters():
                parameter -= 0.01 * parameter.grad


@loop
def backwards_alone() -> None:
    by_hand(model(), 64 + 20)


@loop
def backwards_alone_until_an_optimizer_comes() -> None:
    net = model()
    by_hand(net, 64 + 20)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    for _ in range(10):
        backward(net)
        optimizer.step()


@loop
def more_backwards_in_a_step_than_show_a_clock() -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    for _ in range(2):
        for _ in range(200):
            backward(net)
        optimizer.step()


@loop
def two_networks() -> None:
    nets = model(), model()
    judge, maker = (torch.optim.Adam(net.parameters()) for net in nets)
    for _ in range(5):
        maker.zero_grad()
        backward(nets[1])
        judge.zero_grad()
        backward(nets[0])
        judge.step()
        maker.step()


@loop
def accumulation() -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    for number, (batch,) in enumerate(data(12), 1):
        net(batch).sum().backward()
        if number % 4 == 0:
            optimizer.step()


@loop
def closures() -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)

    def closure() -> Any:
        backward(net)
        return 0.0

    for _ in range(5):
        optimizer.step(closure)


@loop
def closures_called_often() -> None:
    net = model()
    optimizer = torch.optim.LBFGS(net.parameters(), max_iter=4)

    def closure() -> Any:
        optimizer.zero_grad()
        loss = (net(torch.ones(4, 8)) - 3).square().mean()
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(closure)


@loop
def sub_groups() -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    for _ in range(5):
        backward(net)
        for _ in range(3):
            optimizer.step()


@loop
def skipped_by_the_scaler() -> Any:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    changes = 0
    for number in range(6):
        before = copy.deepcopy(net.weight.data)
        optimizer.zero_grad()
        scaler.scale(net(torch.ones(4, 8)).sum() * (float("inf") if number < 2 else 1)).backward()
        scaler.step(optimizer)
        scaler.update()
        changes += not torch.equal(before, net.weight.data)
    return changes


@loop
def a_scaler_that_is_switched_off() -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    for _ in range(5):
        backward(net)
        scaler.step(optimizer)


@loop
def inside_of_backward() -> None:
    net = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(80)))
    optimizers = {
        parameter: torch.optim.SGD([parameter], lr=1e-6) for parameter in net.parameters()
    }

    def update(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in net.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    for _ in range(5):
        backward(net)


@loop
def without_backward() -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    for _ in range(5):
        weight, bias = torch.autograd.grad(net(torch.ones(4, 8)).sum(), [net.weight, net.bias])
        net.weight.grad, net.bias.grad = weight, bias
        optimizer.step()


@loop
def an_optimizer_that_raises() -> int:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    other = torch.optim.SGD(net.parameters(), lr=0.01)

    def fail(*_: Any) -> None:
        raise ZeroDivisionError

    failed = 0
    for number in range(5):
        backward(net)
        handle = optimizer.register_step_pre_hook(fail) if number == 2 else None
        try:
            optimizer.step()
        except ZeroDivisionError:
            failed += 1
        other.step()
        if handle is not None:
            handle.remove()
    return failed


def fails_and_is_replaced(steps_before: int) -> None:
    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError

    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    for _ in range(steps_before):
        backward(net)
        optimizer.step()
    optimizer.register_step_pre_hook(fail)
    backward(net)
    with contextlib.suppress(torch.OutOfMemoryError):
        optimizer.step()
    # Before the first one is gone, whose id it would get.
    other = torch.optim.SGD(net.parameters(), lr=0.01)
    del optimizer
    for _ in range(5):
        backward(net)
        other.step()


@loop
def an_optimizer_that_is_replaced_after_its_first_step_failed() -> None:
    fails_and_is_replaced(0)


@loop
def an_optimizer_that_is_replaced_after_a_later_step_failed() -> None:
    fails_and_is_replaced(5)


@loop
def gradients_that_no_backward_made() -> None:
    """The first 64 steps without one may be sub-groups of the one before."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    backward(net)
    for _ in range(1 + 64 + 10):
        optimizer.step()
        weight, bias = torch.autograd.grad(net(torch.ones(4, 8)).sum(), [net.weight, net.bias])
        net.weight.grad, net.bias.grad = weight, bias


@loop
def closures_that_are_none() -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    for number in range(5):
        backward(net)
        if number % 2:
            scaler.step(optimizer, None)
        else:
            optimizer.step(None)


@loop
def interrupted_at_any_line() -> list[int]:
    """Steps counted of the two after an interrupt, for each line of the hooks that it hits."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)

    def train(batches: Any, steps: int = 1) -> None:
        for _ in range(steps):
            (batch,) = next(batches)
            net(batch).sum().backward()
            optimizer.step()

    functions = ("__next__", "backward", "before", "after", "begin", "end")
    counted: list[int] = []
    while True:
        batches = iter(data(6))
        train(batches, 3)
        if not interrupted(partial(train, batches), functions, len(counted)):
            return counted
        assert state.monitor is not None
        before = state.monitor.clock.steps
        train(batches, 2)
        counted.append(state.monitor.clock.steps - before)


@loop
def a_gpu_that_comes_into_use() -> None:
    """At the fourth of ten steps, of which each takes 30 ms of it for forward, 60 for backward."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    cuda = SimulatedCuda()
    net.register_full_backward_hook(lambda *_: cuda.launch(60))
    for number, (batch,) in enumerate(data(10)):
        cuda.launch(30)
        net(batch).sum().backward()
        optimizer.step()
        cuda.run()
        assert state.monitor is not None
        clock = state.monitor.clock
        if number == 2:
            clock.cuda, clock._look_ns = cuda, 0
    clock.finish()


@loop
def two_trainings_of_a_framework() -> None:
    for _ in range(2):
        state.begin_training("lightning")
        monitor = state.monitor
        assert monitor is not None
        for _ in range(3):
            state.end_step("lightning")
        state.end_training("lightning")
        with monitor.phase("pause"):
            time.sleep(SLEEP_S)


@loop
def a_clock_that_is_gone() -> None:
    net = model()
    for _ in range(2):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        for _ in range(3):
            backward(net)
            optimizer.step()
        del optimizer
        gc.collect()


@loop
def a_clock_that_stands_still() -> None:
    """After a step of each nothing tells a turn of the second's from a step of both."""
    first, second = optimizers(2)
    in_turn(first, second)
    in_turn(*[second] * 20)


@loop
def phases_of_one_optimizer_each() -> None:
    for optimizer in optimizers(2):
        in_turn(*[optimizer] * 100)


@loop
def phases_that_come_back() -> None:
    first, second = optimizers(2)
    for _ in range(3):
        in_turn(*[first] * 10, *[second] * 10)


@loop
def phases_of_two_optimizers_each() -> None:
    for pair in (optimizers(2), optimizers(2)):
        in_turn(*pair * 20)


@loop
def a_new_optimizer_for_each_inner_loop() -> None:
    (outer,) = optimizers(1)
    for _ in range(20):
        in_turn(*optimizers(1) * 5, outer)


@loop
def a_critic_that_steps_five_times() -> None:
    critic, generator = optimizers(2)
    in_turn(*[*[critic] * 5, generator] * 10)


@loop
def a_generator_before_its_critics_five_steps() -> None:
    critic, generator = optimizers(2)
    in_turn(*[generator, *[critic] * 5] * 10)


@loop
def a_clock_that_steps_no_more_after_many_turns() -> None:
    """For as long as it takes to know; then each step of the second counts."""
    first, second = optimizers(2)
    in_turn(*[first, second] * 50)
    in_turn(*[second] * 30)


@loop
def a_clock_that_steps_no_more_and_slow_steps() -> None:
    first, second = optimizers(2)
    in_turn(*[first, second] * 5)
    monitor = state.monitor
    assert monitor is not None
    for _ in range(10):
        # As if each had taken the time after which few are waited for.
        monitor.clock.begun_ns -= 11 * 10**9
        in_turn(second)


def optimizers(count: int) -> list[torch.optim.Optimizer]:
    """All live as long as the loop does: each would be a clock that is gone."""
    kept.extend(torch.optim.SGD(model().parameters(), lr=1e-6) for _ in range(count))
    return kept[-count:]


kept: list[torch.optim.Optimizer] = []


def in_turn(*steppers: torch.optim.Optimizer) -> None:
    for optimizer in steppers:
        sum(p.sum() for p in optimizer.param_groups[0]["params"]).backward()
        optimizer.step()


@loop
def two_networks_on_one_batch() -> None:
    judge, maker = model(), model()
    steppers = [torch.optim.SGD(net.parameters(), lr=0.01) for net in (judge, maker)]
    for (batch,) in data(6):
        for net, optimizer in zip((judge, maker), steppers, strict=True):
            time.sleep(SLEEP_S)
            net(batch).sum().backward()
            optimizer.step()
        time.sleep(SLEEP_S)


@loop
def another_threads_optimizer() -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)

    def elsewhere() -> None:
        twin = model()
        other = torch.optim.SGD(twin.parameters(), lr=0.01)
        for _ in range(7):
            backward(twin)
            other.step()

    for number in range(5):
        backward(net)
        optimizer.step()
        if number == 2:
            thread = threading.Thread(target=elsewhere)
            thread.start()
            thread.join()


@loop
def only_evaluating() -> bool:
    net = model()
    with torch.no_grad():
        for (batch,) in data(5):
            net(batch)
    return state.monitor is None and threading.active_count() == 1


# --- phases ---------------------------------------------------------------------------------------


class Slow(Dataset[torch.Tensor]):  # type: ignore[misc]
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(SLEEP_S / 2)
        return torch.ones(8)


@loop
def phases() -> None:
    """Every part takes at least SLEEP_S, twice in one step; the second step is plain ``other``."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    backward(net)
    optimizer.step()
    net.register_full_backward_hook(lambda *_: time.sleep(SLEEP_S))
    optimizer.register_step_pre_hook(lambda *_: time.sleep(SLEEP_S))
    for number, batch in enumerate(DataLoader(Slow(), batch_size=2)):
        time.sleep(SLEEP_S)
        loss = net(batch).sum()
        loss.backward()
        time.sleep(SLEEP_S)
        if number % 2:
            optimizer.step()


@loop
def evaluation() -> Any:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    backward(net)
    optimizer.step()
    with torch.no_grad():
        for batch in DataLoader(Slow(), batch_size=4):
            net(batch)
            time.sleep(SLEEP_S)
    ended = state.monitor is not None and state.monitor.clock.current
    time.sleep(SLEEP_S)
    # One that is left early lasts until training goes on.
    with torch.inference_mode():
        for batch in DataLoader(Slow(), batch_size=4):
            net(batch)
            break
    time.sleep(SLEEP_S)
    backward(net)
    optimizer.step()
    return ended


@loop
def evaluation_without_gradients_inside_only() -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    for _ in range(2):
        for (batch,) in data(3):
            net(batch).sum().backward()
            optimizer.step()
        for (batch,) in data(10):
            with torch.no_grad():
                net(batch)
            time.sleep(0.005)


@loop
def checkpoint() -> None:
    import torch.distributed.checkpoint as dcp

    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    for _ in range(2):
        backward(net)
        optimizer.step()
        torch.save(net.state_dict(), io.BytesIO())
    monitor = state.monitor
    assert monitor is not None
    index = monitor.phase("checkpoint").index
    optimizer.step()
    saved_ns = monitor.clock.totals[index]
    assert saved_ns > 0
    dcp.save(net.state_dict(), checkpoint_id=os.path.join(sys.argv[1], "dcp"), no_dist=True)
    backward(net)
    optimizer.step()
    assert monitor.clock.totals[index] > saved_ns


@loop
def the_users_phases_are_innermost() -> None:
    monitor = warpwatch.attach()
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    backward(net)
    optimizer.step()
    for (batch,) in data(2):
        with monitor.phase("augment"):
            time.sleep(SLEEP_S)
        net(batch).sum().backward()
        with monitor.phase("update"):
            optimizer.step()
