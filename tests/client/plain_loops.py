"""Training loops that know nothing of the hooks and have no DataLoader."""

from __future__ import annotations

import pickle
from typing import Any

import torch

from tests.client.loop_base import loop, reported


class Model(torch.nn.Module):  # type: ignore[misc]
    """Four ids of eight a row in, a number each out."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(16, 8)
        self.inner = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))

    def forward(self, ids: Any) -> Any:
        return self.inner(self.embedding(ids))


def train(net: Any, steps: int = 6) -> None:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(steps):
        net(torch.randint(16, (4, 8))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@loop
def a_class_that_is_pickled_by_its_content() -> list[list[Any]]:
    """As cloudpickle does: what its method refers to."""
    train(Model())
    parts = [cell.cell_contents for cell in vars(Model)["__call__"].__closure__]
    return [list(part) for part in pickle.loads(pickle.dumps(parts)) if isinstance(part, set)]


@loop
def compiled_after_it_was_seen() -> Any:
    net = Model()
    train(net)
    found = ["__call__" in vars(Model), reported(None)["phases_s"]["forward"]]
    train(torch.compile(net, backend="eager", fullgraph=True))
    return [*found, "__call__" in vars(Model)]
