"""Training loops that know nothing of the hooks: their optimizers, and the parts of their steps."""

import contextlib
import copy
import gc
import io
import os
import pickle
import sys
import threading
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

import warpwatch
from tests.client.interrupts import interrupted
from tests.client.loop_base import (
    backward,
    by_hand,
    data,
    learn,
    model,
    reported,
    sgd,
    spend,
    state,
    train,
    trained,
)
from tests.client.simulated_cuda import SimulatedCuda

# --- the optimizer as clock -----------------------------------------------------------------------


def plain(net: Any, optimizer: Any) -> None:
    for (batch,) in data(5):
        learn(net, optimizer, batch)
        optimizer.zero_grad()


def backwards_alone_until_an_optimizer_comes() -> None:
    net = model()
    by_hand(net, [(torch.ones(4, 8),)] * (64 + 20))
    train(net, sgd(net), steps=10)


def more_backwards_in_a_step_than_show_a_clock(net: Any, optimizer: Any) -> None:
    for _ in range(2):
        train(net, steps=200)
        optimizer.step()


def closures(net: Any, optimizer: Any) -> None:
    """The time before and after its closure is its own."""
    optimizer.register_step_post_hook(lambda *_: spend())

    def closure() -> Any:
        spend()
        backward(net)
        spend()
        return 0.0

    for _ in range(5):
        optimizer.step(closure)
        spend()


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


def sub_groups(net: Any, optimizer: Any) -> None:
    train(net, *[optimizer] * 3, steps=5)


def skipped_by_the_scaler(net: Any, optimizer: Any) -> Any:
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


def a_scaler_that_is_switched_off(net: Any, optimizer: Any) -> None:
    """None is not a closure."""
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    for number in range(6):
        backward(net)
        if number % 3 == 0:
            scaler.step(optimizer)
        elif number % 3 == 1:
            scaler.step(optimizer, None)
        else:
            optimizer.step(None)


def an_optimizer_that_takes_no_closure() -> None:
    net, own = model(), type("Own", (torch.optim.SGD,), {"step": lambda _, given: given})
    optimizer: Any = own(net.parameters())
    for given in (torch.ones(3), net, {"epoch": 3}):
        backward(net)
        assert optimizer.step(given) is given


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
    train(net, steps=5)


def set_gradients(net: torch.nn.Linear) -> None:
    weight, bias = torch.autograd.grad(net(torch.ones(4, 8)).sum(), [net.weight, net.bias])
    net.weight.grad, net.bias.grad = weight, bias


def without_backward(net: Any, optimizer: Any) -> None:
    for _ in range(5):
        set_gradients(net)
        optimizer.step()


def gradients_that_no_backward_made(net: Any, optimizer: Any) -> None:
    """The first 64 steps without one may be sub-groups of the one before."""
    backward(net)
    for _ in range(1 + 64 + 10):
        optimizer.step()
        set_gradients(net)


def an_optimizer_that_raises() -> None:
    net = model()
    optimizer, other = sgd(net, net)

    def fail(*_: Any) -> None:
        raise ZeroDivisionError

    for number in range(5):
        backward(net)
        handle = optimizer.register_step_pre_hook(fail) if number == 2 else None
        with contextlib.suppress(ZeroDivisionError):
            optimizer.step()
        other.step()
        if handle is not None:
            handle.remove()


def a_backward_that_raises(net: Any, optimizer: Any) -> None:
    def fail(*_: Any) -> None:
        raise ZeroDivisionError

    for number in range(5):
        handle = net.bias.register_hook(fail) if number == 2 else None
        with contextlib.suppress(ZeroDivisionError):
            learn(net, optimizer, torch.ones(4, 8))
        if handle is not None:
            handle.remove()


def an_optimizer_that_is_replaced_after_a_later_step_failed(steps_before: int = 5) -> None:
    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError

    net, optimizer = trained()
    train(net, optimizer, steps=steps_before)
    optimizer.register_step_pre_hook(fail)
    with contextlib.suppress(torch.OutOfMemoryError):
        train(net, optimizer)
    # Before the first one is gone, whose id it would get.
    other = sgd(net)
    del optimizer
    train(net, other, steps=5)


an_optimizer_that_is_replaced_after_its_first_step_failed = partial(
    an_optimizer_that_is_replaced_after_a_later_step_failed, 0
)


def interrupted_at_any_line(net: Any, optimizer: Any) -> list[int]:
    """Steps counted of the two after an interrupt, for each line of the hooks that it hits."""

    def take(batches: Any, steps: int = 1) -> None:
        for _ in range(steps):
            (batch,) = next(batches)
            learn(net, optimizer, batch)

    functions = ("__next__", "backward", "before", "after", "begin", "end")
    counted: list[int] = []
    while True:
        batches = iter(data(6))
        take(batches, 3)
        if not interrupted(partial(take, batches), functions, len(counted)):
            return counted
        before = state.monitor.clock.steps
        take(batches, 2)
        counted.append(state.monitor.clock.steps - before)


def a_gpu_that_comes_into_use(net: Any, optimizer: Any) -> None:
    """At the fourth of ten steps, of which each takes 30 ms of it for forward, 60 for backward."""
    cuda = SimulatedCuda()
    net.register_full_backward_hook(lambda *_: cuda.launch(60))
    for number, (batch,) in enumerate(data(10)):
        cuda.launch(30)
        learn(net, optimizer, batch)
        cuda.run()
        clock = state.monitor.clock
        if number == 2:
            clock.cuda, clock._poll_ns = cuda, 0
    clock.finish()


def a_clock_that_is_gone() -> None:
    net = model()
    for _ in range(2):
        train(net, sgd(net), steps=3)
        gc.collect()


# --- several optimizers that step in turn ---------------------------------------------------------


def in_turn(*steppers: torch.optim.Optimizer) -> None:
    for optimizer in steppers:
        sum(p.sum() for p in optimizer.param_groups[0]["params"]).backward()
        optimizer.step()


def phases_of_one_optimizer_each() -> None:
    first, second = sgd(model(), model())
    in_turn(*[first] * 100, *[second] * 100)


def a_critic_that_steps_five_times() -> None:
    critic, generator = sgd(model(), model())
    in_turn(*[*[critic] * 5, generator] * 10)


def an_optimizer_that_shared_all_steps_before_it_steps_alone() -> None:
    net = model()
    first, second = sgd(net, net)
    train(net, first, second, steps=10)
    train(net, second, steps=10)


def a_new_optimizer_for_each_inner_loop() -> None:
    outer, inner = sgd(model()), [sgd(model()) for _ in range(20)]
    for optimizer in inner:
        in_turn(*[optimizer] * 5, outer)


def two_networks_on_one_batch() -> None:
    first, second = model(), model()
    of_first, of_second = sgd(first, second)
    for (batch,) in data(6):
        spend()
        learn(first, of_first, batch)
        spend()
        learn(second, of_second, batch)
        spend()


def threads_that_train_at_once() -> list[int]:
    """Return how many steps were not counted: 4 beside the first thread, 7 before main rested.

    And all backwards and updates.
    """
    is_second_there, has_first_ended = threading.Event(), threading.Event()

    def second() -> None:
        net, optimizer = trained()
        train(net, optimizer, steps=4)
        is_second_there.set()
        has_first_ended.wait()
        train(net, optimizer, steps=5)

    def first() -> None:
        train(*trained(), steps=3)
        others[0].start()
        is_second_there.wait()

    def third() -> None:
        train(*trained(), steps=7)
        spend(11)
        train(*trained(), steps=20)

    others = [threading.Thread(target=second), threading.Thread(target=third)]
    beginner = threading.Thread(target=first)
    beginner.start()
    beginner.join()
    has_first_ended.set()
    others[0].join()
    train(*trained(), steps=2)
    others[1].start()
    others[1].join()
    return [state.monitor.clock.steps_elsewhere, state.monitor.clock.calls()]


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
        spend(0.5)
        return torch.ones(8)


def phases(net: Any, optimizer: Any) -> None:
    """Every part takes one, twice in one step; the second step is plain ``other``."""
    train(net, optimizer)
    net.register_full_backward_hook(lambda *_: spend())
    optimizer.register_step_pre_hook(lambda *_: spend())
    for number, batch in enumerate(DataLoader(Slow(), batch_size=2)):
        spend()
        loss = net(batch).sum()
        loss.backward()
        spend()
        if number % 2:
            optimizer.step()


def evaluation(net: Any, optimizer: Any) -> None:
    train(net, optimizer)
    with torch.no_grad():
        for batch in DataLoader(Slow(), batch_size=4):
            net(batch)
            spend()
    spend()
    # One that is left early lasts until training goes on.
    with torch.inference_mode():
        for batch in DataLoader(Slow(), batch_size=4):
            net(batch)
            break
    spend()
    train(net, optimizer)


def checkpoint() -> None:
    import torch.distributed.checkpoint as dcp

    net, optimizer = trained()
    for _ in range(2):
        train(net, optimizer)
        torch.save(net.state_dict(), io.BytesIO())
    monitor = state.monitor
    index = monitor.phase("checkpoint").index
    optimizer.step()
    saved_ns = monitor.clock.totals[index]
    assert saved_ns > 0
    dcp.save(net.state_dict(), checkpoint_id=os.path.join(sys.argv[1], "dcp"), no_dist=True)
    train(net, optimizer)
    assert monitor.clock.totals[index] > saved_ns
    assert dcp.async_save.__wrapped__
    # A trace shows it too.
    with torch.profiler.profile() as own:
        torch.save(net.state_dict(), io.BytesIO())
    assert "checkpoint" in {one.key for one in own.key_averages()}


def the_users_phases_are_innermost() -> None:
    monitor = warpwatch.attach()
    net, optimizer = trained()
    train(net, optimizer)
    for (batch,) in data(2):
        with monitor.phase("augment"):
            spend()
        net(batch).sum().backward()
        with monitor.phase("update"):
            optimizer.step()


# --- a model's class ------------------------------------------------------------------------------


class Model(torch.nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(16, 8)
        self.inner = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))

    def forward(self, ids: Any) -> Any:
        return self.inner(self.embedding(ids))


def train_model(net: Any) -> None:
    optimizer = sgd(net)
    for _ in range(6):
        net(torch.randint(16, (4, 8))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def a_part_that_is_called_alone_later() -> None:
    net = Model()
    train_model(net)
    optimizer = sgd(net.inner)
    for _ in range(30):
        loss = net.inner(torch.ones(4, 8)).square().mean()
        spend()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def a_class_that_is_pickled_by_its_content() -> list[list[Any]]:
    """As cloudpickle does: what its method refers to."""
    train_model(Model())
    parts = [cell.cell_contents for cell in vars(Model)["__call__"].__closure__]
    return [list(part) for part in pickle.loads(pickle.dumps(parts)) if isinstance(part, set)]


def compiled_after_it_was_seen() -> Any:
    net = Model()
    train_model(net)
    found = ["__call__" in vars(Model), reported(None)["phases_s"]["forward"]]
    train_model(torch.compile(net, backend="eager", fullgraph=True))
    return [*found, "__call__" in vars(Model)]
