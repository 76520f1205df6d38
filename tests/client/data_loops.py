"""Training loops that know nothing of the hooks: their data, and what of them is compiled."""

import contextlib
import io
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial, wraps
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import warpwatch
from tests.client.loop_base import (
    by_hand,
    data,
    fit,
    learn,
    model,
    sgd,
    state,
    train,
    trained,
)

# --- the DataLoader as clock, and its batches -----------------------------------------------------


def last_resort_until_an_optimizer_comes() -> None:
    net = model()
    by_hand(net, data(64 + 1 + 20))
    fit(net, sgd(net), 10)


def time_first() -> None:
    """Sequences of 7 ids, 8 a batch and 4 in the last."""
    net = torch.nn.Embedding(2, 4)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    rows = [torch.ones(7, dtype=torch.long) for _ in range(44)]
    for batch in DataLoader(rows, batch_size=8, collate_fn=partial(torch.stack, dim=1)):
        learn(net, optimizer, batch)


def the_users_own_numbers() -> None:
    monitor = warpwatch.attach()
    net, optimizer = trained()
    for (batch,) in data(5):
        with monitor.step(samples=1000):
            learn(net, optimizer, batch)
        # It belongs to the next step.
        net(batch).sum().backward()


class Nested(IterableDataset[torch.Tensor]):  # type: ignore[misc]
    def __iter__(self) -> Iterator[torch.Tensor]:
        for (batch,) in data(2, 6):
            yield batch.sum(0)


def a_dataset_that_loads_itself(net: Any, optimizer: Any) -> None:
    for batch in DataLoader(Nested(), batch_size=1):
        learn(net, optimizer, batch)


def data_that_fails(net: Any, optimizer: Any) -> None:
    class Failing(TensorDataset):  # type: ignore[misc]
        def __getitem__(self, index: int) -> Any:
            if index == 5 * 4:
                raise ZeroDivisionError
            return super().__getitem__(index)

    for rows in (Failing(torch.ones(40, 8)), TensorDataset(torch.ones(40, 8))):
        with contextlib.suppress(ZeroDivisionError):
            for (batch,) in DataLoader(rows, batch_size=4):
                learn(net, optimizer, batch)


def batches_that_another_thread_fetches(net: Any, optimizer: Any) -> None:
    with ThreadPoolExecutor(1) as thread:
        batches = iter(data(12))
        for _ in range(12):
            (batch,) = thread.submit(next, batches).result()
            learn(net, optimizer, batch)


# --- torch.compile --------------------------------------------------------------------------------


def compiled_training(optimizer_first: bool) -> Any:
    net = model()
    build = [
        lambda: torch.optim.Adam(net.parameters(), lr=0.01),
        lambda: torch.compile(net, backend="eager", fullgraph=True),
    ]
    made = [make() for make in (build if optimizer_first else reversed(build))]
    optimizer, compiled = made if optimizer_first else reversed(made)
    losses = []
    for (batch,) in data(5):
        loss = compiled(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, counted()


compiled_after_the_optimizer = partial(compiled_training, True)
compiled_before_the_optimizer = partial(compiled_training, False)


def compiled_optimizer(zero_first: bool) -> Any:
    net = model()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    step = torch.compile(optimizer.step, backend="eager")
    losses = []
    for (batch,) in data(10):
        if zero_first:
            optimizer.zero_grad()
        loss = net(batch).square().mean()
        loss.backward()
        step()
        if not zero_first:
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses, counted()


a_compiled_optimizer_zeroed_first = partial(compiled_optimizer, True)
a_compiled_optimizer_zeroed_last = partial(compiled_optimizer, False)


def a_zero_grad_of_the_programs_own() -> Any:
    """Put in the place of torch's before anything is compiled; how often it was called as well."""
    optimizers: Any = torch.optim.Optimizer
    original = optimizers.zero_grad
    calls = []

    @wraps(original)
    def zero_grad(optimizer: Any, *args: Any, **kwargs: Any) -> None:
        calls.append(optimizer)
        original(optimizer, *args, **kwargs)

    optimizers.zero_grad = zero_grad
    losses, graphs = compiled_optimizer(False)
    return [len(calls), *losses], graphs


def a_compiled_step_without_a_loader(net: Any, optimizer: Any) -> Any:
    return compiled_step(net, optimizer, [(torch.ones(4, 8),)] * 10)


def a_compiled_step_with_all_in_it(net: Any, optimizer: Any) -> Any:
    return compiled_step(net, optimizer, data(10))


def compiled_step(net: Any, optimizer: Any, batches: Any) -> Any:
    @torch.compile(backend="eager")  # type: ignore[untyped-decorator]
    def train(batch: torch.Tensor) -> torch.Tensor:
        loss = net(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    losses = [train(batch).item() for (batch,) in batches]
    return losses, counted()


def a_compiled_function_that_loads_and_saves(net: Any, optimizer: Any) -> Any:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    train(net, optimizer)

    @torch.compile(backend="eager")  # type: ignore[untyped-decorator]
    def epoch() -> torch.Tensor:
        total = torch.zeros(())
        for (batch,) in data(3):
            loss = net(batch).square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            total = total + loss.detach()
        torch.save(total, io.BytesIO())
        return total

    return [epoch().item() for _ in range(3)], counted()


def counted() -> Any:
    from torch._dynamo.utils import counters

    breaks = sum(counters["graph_break"].values())
    return dict(counters["stats"]), breaks, dict(counters["frames"])


def hooks_that_an_old_dynamo_took_away() -> None:
    from warpwatch.hooks import optimizer as optimizer_hook

    net, optimizer = trained()
    # Do what TorchPatcher.patch of PyTorch 2.0 to 2.8 does at the first torch.compile.
    torch.optim.SGD.step = torch.optim.SGD.step.__wrapped__
    torch.optim.SGD.step.hooked = True
    optimizer_hook.restore(torch.optim.Optimizer, optimizer_hook.hooks_of(state))
    optimizer_hook.restore(torch.optim.Optimizer, optimizer_hook.hooks_of(state))
    train(net, optimizer, sgd(net), steps=5)
