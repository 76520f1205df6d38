"""The parameters that optimizers train, as the ring's metadata says them."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

from warpwatch import model
from warpwatch.model import Parameters

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch


def test_those_of_all_optimizers_that_exist_are_counted_once() -> None:
    known, net = Parameters(), torch.nn.Linear(10, 4).bfloat16()
    weights = torch.optim.SGD([net.weight], lr=0.1)
    assert not known.know(weights)
    assert known.add(weights) == {"parameters": 40, "precision": "bfloat16"}
    biases = torch.optim.AdamW([net.bias])
    assert known.add(biases)["parameters"] == 44
    assert known.know(weights) and known.know(biases)
    del weights
    full = torch.optim.SGD(torch.nn.Linear(10, 4).parameters(), lr=0.1)
    # The types differ: which precision it computes in is not known.
    assert known.add(full) == {"parameters": 48}


def test_nothing_is_said_of_experts_of_which_a_token_takes_few() -> None:
    def said(*shapes: tuple[int, ...]) -> dict[str, object]:
        weights = [torch.nn.Parameter(torch.zeros(shape)) for shape in shapes]
        return Parameters().add(torch.optim.SGD(weights, lr=0.1))

    attention = [(48, 16), (16, 16)] * 2
    # Two layers with a router of four experts, of one matrix up and one down.
    experts = [(4, 16)] * 2 + [(40, 16), (16, 40)] * 8
    assert said(*attention, *experts) == {}
    # Their gates are of the shape of what goes up, and a shared expert is there for all.
    assert said(*attention, *experts, *[(40, 16)] * 8, *[(40, 16), (16, 40)] * 2) == {}
    assert said(*attention, (4, 16, 40), (4, 40, 16)) == {}
    # Without experts: a head of four classes.
    dense = [*attention, *[(40, 16), (16, 40)] * 2, (4, 16), (16,)]
    assert said(*dense) == {"parameters": 2 * (64 * 16 + 80 * 16) + 80}


def test_nothing_is_said_of_optimizers_that_train_copies_of_a_model() -> None:
    known, outer = Parameters(), torch.nn.Linear(10, 4)
    first = torch.optim.AdamW(outer.parameters())
    assert known.add(first) == {"parameters": 44}
    inner = torch.optim.SGD(torch.nn.Linear(10, 4).parameters(), lr=0.1)
    assert known.add(inner) == {}
    del inner
    assert known.add(another := torch.optim.SGD([torch.zeros(8, requires_grad=True)])) == {
        "parameters": 52
    }
    assert known.know(another)


def test_nothing_is_said_if_the_model_is_held_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    frozen = torch.nn.Linear(10, 4)
    frozen.bias.requires_grad_(False)
    some = Parameters()
    assert some.add(partly := torch.optim.SGD(frozen.parameters(), lr=0.1)) == {}
    assert some.know(partly)
    shard = torch.nn.Linear(10, 4)
    shard.weight._fsdp_flattened = True
    assert Parameters().add(torch.optim.SGD(shard.parameters(), lr=0.1)) == {}
    other = ModuleType("an optimizer of another form")
    assert some.add(other) == {}
    assert some.know(other)
    # A sharded one has the shape of the whole.
    monkeypatch.setattr(model, "_noted", {})
    mesh = {"mesh_dim_names": ("dp",), "shape": (2,), "get_coordinate": lambda: [1]}
    sharded = torch.nn.Linear(10, 4)
    sharded.weight.device_mesh = SimpleNamespace(**mesh)
    assert Parameters().add(torch.optim.SGD(sharded.parameters(), lr=0.1)) == {"parameters": 44}
    assert model._noted == {"mesh_dp": (1, 2)}
    monkeypatch.setitem(sys.modules, "peft", ModuleType("peft"))
    whole = torch.nn.Linear(10, 4)
    assert Parameters().add(torch.optim.SGD(whole.parameters(), lr=0.1)) == {}
