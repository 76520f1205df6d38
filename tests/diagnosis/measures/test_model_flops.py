"""Model FLOPs counted in traces of real models, beside sums by hand and PyTorch's own counter."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from warpwatch_diagnosis.measures.measures import measure
from warpwatch_diagnosis.trace.reader import read_trace

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.torch, pytest.mark.slow]
nn, functional = torch.nn, torch.nn.functional


def counted(folder: Path, step: Callable[[], Any]) -> float:
    """By the diagnosis, in a trace with shapes; what PyTorch counts is the same."""
    from torch.profiler import ProfilerActivity, profile
    from torch.utils.flop_counter import FlopCounterMode

    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as recorded:
        step()
    path = folder / "trace.json"
    recorded.export_chrome_trace(str(path))
    found = sum(work.model_flops for work in measure(read_trace(path)).operators.work.values())
    with FlopCounterMode(display=False) as counter:
        step()
    assert found == pytest.approx(counter.get_total_flops(), rel=0.02)
    return found


class Block(nn.Module):  # type: ignore[misc, name-defined]
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Any) -> Any:
        parts = (
            part.unflatten(2, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(functional.layer_norm(x, x.shape[-1:])).chunk(3, -1)
        )
        seen = functional.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(functional.layer_norm(x, x.shape[-1:]))))


def test_gpt_2_of_124_million_parameters(tmp_path: Path) -> None:
    """6 N + 12 L d T a token (PaLM, appendix B); N without the positions, the head tied."""
    layers, width, heads, vocabulary, length = 12, 768, 12, 50304, 64
    embedding = nn.Embedding(vocabulary, width)
    blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
    ids = torch.randint(vocabulary, (1, length))

    def step() -> None:
        logits = functional.linear(blocks(embedding(ids)), embedding.weight)
        functional.cross_entropy(logits.flatten(0, 1), ids.flatten()).backward()

    parameters = vocabulary * width + sum(weight.numel() for weight in blocks.parameters())
    by_hand = length * (6 * parameters + 12 * layers * width * length)
    assert counted(tmp_path, step) == pytest.approx(by_hand, rel=0.02)


class Bottleneck(nn.Module):  # type: ignore[misc, name-defined]
    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.body = nn.Sequential(
            nn.Conv2d(inputs, width, 1, bias=False),
            nn.Conv2d(width, width, 3, stride, 1, bias=False),
            nn.Conv2d(width, outputs, 1, bias=False),
        )
        same = inputs == outputs and stride == 1
        self.skip = nn.Identity() if same else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Any) -> Any:
        return self.body(x) + self.skip(x)


def test_resnet_50(tmp_path: Path) -> None:
    """Three times the 4.09 G multiply-adds of its forward (He et al. 2015, stride in the 3x3)."""
    layers: list[Any] = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.MaxPool2d(3, 2, 1)]
    inputs = 64
    for width, blocks, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for number in range(blocks):
            layers.append(Bottleneck(inputs, width, 1 if number else stride))
            inputs = 4 * width
    net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, 1000))
    images = torch.randn(1, 3, 224, 224)
    found = counted(tmp_path, lambda: net(images).square().mean().backward())
    assert found == pytest.approx(3 * 2 * 4.09e9, rel=0.02)


def test_a_small_mixture_of_experts(tmp_path: Path) -> None:
    """Two of four experts a token: 6 FLOPs for each active weight, and its router's."""
    width, tokens = 128, 256
    router = nn.Linear(width, 4)
    experts = [
        nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        for _ in range(4)
    ]
    x = torch.randn(tokens, width, requires_grad=True)

    def step() -> None:
        weights, chosen = router(x).softmax(-1).topk(2)
        total = torch.zeros_like(x)
        for number, expert in enumerate(experts):
            rows, places = (chosen == number).nonzero(as_tuple=True)
            total = total.index_add(0, rows, expert(x[rows]) * weights[rows, places, None])
        total.square().mean().backward()

    by_hand = 6 * tokens * (4 * width + 2 * 2 * 4 * width * width)
    assert counted(tmp_path, step) == pytest.approx(by_hand, rel=0.02)
