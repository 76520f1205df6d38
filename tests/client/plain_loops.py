"""Training loops that know nothing of the hooks and have no DataLoader."""

from __future__ import annotations

import pickle
import time
from typing import Any

import torch

from tests.client.loop_base import SLEEP_S, loop, reported, state


class Model(torch.nn.Module):  # type: ignore[misc]
    """A slow one: four ids of eight a row in, a number each out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = torch.nn.Embedding(16, 8)
        self.inner = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))

    def forward(self, ids: Any) -> Any:
        time.sleep(SLEEP_S)
        return self.inner(self.embedding(ids))


class Quick(Model):
    """One without what no graph can hold."""

    def forward(self, ids: Any) -> Any:
        return self.inner(self.embedding(ids))


def get_batch() -> Any:
    return torch.randint(16, (4, 8))


def estimate(net: Any, calls: int) -> None:
    net.eval()
    with torch.no_grad():
        for _ in range(calls):
            net(get_batch())
    net.train()


def train(net: Any, steps: int, accumulated: int = 1, teacher: Any = None) -> list[float]:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    losses = []
    for step in range(steps):
        for _ in range(accumulated):
            ids = get_batch()
            loss = net(ids).square().mean()
            if teacher is not None:
                with torch.no_grad():
                    wanted = teacher(ids).mean()
                loss = loss + wanted
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        if step == 5 and teacher is None:
            estimate(net, 14)
    return losses


@loop
def batches_without_a_loader() -> list[float]:
    return train(Model(), 8, accumulated=2)


@loop
def batches_without_a_loader_unwatched() -> list[float]:
    state.off = True
    return train(Model(), 8, accumulated=2)


@loop
def a_teacher_at_each_step() -> None:
    train(Model(), 8, teacher=Model().eval())


@loop
def a_policy_that_acts() -> Any:
    """PPO: it acts without gradients in an environment, then learns of that in minibatches."""
    actor, critic = Model(), Model()
    optimizer = torch.optim.SGD([*actor.parameters(), *critic.parameters()], lr=0.1)
    for _ in range(3):
        for _ in range(8):
            with torch.no_grad():
                actor(get_batch())
                critic(get_batch())
            time.sleep(SLEEP_S)
        for _ in range(4):
            (actor(get_batch()).mean() + critic(get_batch()).mean()).backward()
            optimizer.step()
            optimizer.zero_grad()
    # Of a class that is pickled by its content (cloudpickle), what its method refers to.
    parts = [cell.cell_contents for cell in vars(Model)["__call__"].__closure__]
    return [list(part) for part in pickle.loads(pickle.dumps(parts)) if isinstance(part, set)]


@loop
def compiled_after_it_was_seen() -> Any:
    net = Quick()
    train(net, 6)
    found = ["__call__" in vars(Quick), reported(None)["phases_s"]["forward"]]
    train(torch.compile(net, backend="eager", fullgraph=True), 6)
    return [*found, "__call__" in vars(Quick)]
