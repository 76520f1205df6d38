"""FLOPs of each operator are those of ``torch.utils.flop_counter``."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from warpwatch_diagnosis.measures.flops import (
    CONVOLUTIONS,
    convolution_work,
    gradient_of_convolution,
    shapes_of,
    work_of,
)
from warpwatch_diagnosis.trace.kinds import ONE_GRADIENT
from warpwatch_diagnosis.trace.reader import read_trace

torch = pytest.importorskip("torch")
nn: Any = torch.nn
pytestmark = pytest.mark.torch


def perceptron() -> tuple[Any, Any]:
    return nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 10)), torch.randn(32, 64)


def convolutional() -> tuple[Any, Any]:
    layers = nn.Sequential(
        nn.Conv2d(4, 8, 3, padding=1),
        nn.ReLU(),
        # Without groups: torch's counter forgets them in the gradient of the weight.
        nn.Conv2d(8, 16, 3, stride=2),
        nn.ReLU(),
        nn.ConvTranspose2d(16, 6, 2, stride=2),
    )
    return layers, torch.randn(3, 4, 17, 17)


class Attention(nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.made, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, given: Any) -> Any:
        q, k, v = self.made(given).chunk(3, -1)
        return self.out((q @ k.transpose(1, 2)).softmax(-1) @ v)


def attention() -> tuple[Any, Any]:
    return Attention(), torch.randn(4, 20, 32)


def recorded(step: Any, path: Path) -> Counter[str]:
    """By operator, from the shapes in the trace."""
    with torch.profiler.profile(record_shapes=True) as profiler:
        step()
    profiler.export_chrome_trace(str(path))
    found: Counter[str] = Counter()
    outputs = {}
    operators = read_trace(path).events["operator"]
    for event in operators:
        shapes = shapes_of(event.arguments or {})
        if shapes and (known := gradient_of_convolution(event.name, shapes)):
            outputs[known[:2]] = known[2]
    for event in operators:
        shapes = shapes_of(event.arguments or {})
        if not shapes or event.name == "aten::linear":
            continue
        work = work_of(event.name, shapes, (), ONE_GRADIENT in (event.arguments or {}))
        if event.name in CONVOLUTIONS and (shapes[0], shapes[1]) in outputs:
            work = convolution_work(shapes, outputs[shapes[0], shapes[1]], ())
        if work is not None:
            found[event.name.removeprefix("aten::")] += int(work.flops)
    return found


@pytest.mark.parametrize("program", [perceptron, convolutional, attention])
def test_flops_of_each_operator_are_those_of_the_flop_counter(tmp_path: Path, program: Any) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    torch.manual_seed(0)
    model, given = program()

    def step() -> None:
        model(given).square().mean().backward()

    with FlopCounterMode(display=False) as counter:
        step()
    counted = {
        str(operator).rpartition(".")[2]: flops
        for operator, flops in counter.get_flop_counts()["Global"].items()
    }
    assert counted
    assert recorded(step, tmp_path / "trace.json") == counted
