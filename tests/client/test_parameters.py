"""The parameters that optimizers train, as the ring's metadata says them."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from warpwatch.parameters import Parameters

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch


def test_those_of_all_optimizers_that_exist_are_counted_once() -> None:
    known, model = Parameters(), torch.nn.Linear(10, 4).bfloat16()
    weights = torch.optim.SGD([model.weight], lr=0.1)
    assert not known.know(weights)
    assert known.add(weights) == {"parameters": 40, "precision": "bfloat16"}
    biases = torch.optim.AdamW([model.bias])
    assert known.add(biases)["parameters"] == 44
    assert known.know(weights) and known.know(biases)
    del weights
    full = torch.optim.SGD(torch.nn.Linear(10, 4).parameters(), lr=0.1)
    # The types differ: which precision it computes in is not known.
    assert known.add(full) == {"parameters": 48}


def test_nothing_is_said_where_the_optimizer_does_not_hold_the_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    frozen = torch.nn.Linear(10, 4)
    frozen.bias.requires_grad_(False)
    some = Parameters()
    assert some.add(partly := torch.optim.SGD(frozen.parameters(), lr=0.1)) == {}
    assert some.know(partly)
    shard = torch.nn.Linear(10, 4)
    shard.weight._fsdp_flattened = True
    assert Parameters().add(torch.optim.SGD(shard.parameters(), lr=0.1)) == {}
    monkeypatch.setitem(sys.modules, "peft", ModuleType("peft"))
    whole = torch.nn.Linear(10, 4)
    assert Parameters().add(torch.optim.SGD(whole.parameters(), lr=0.1)) == {}
