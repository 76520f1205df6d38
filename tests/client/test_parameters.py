"""The parameters that optimizers train, as the ring's metadata says them."""

import pytest

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
