"""Two networks like those that are trained: a GPT-like transformer and a ResNet of basic blocks.

``Workload`` is one of them with its batch and optimizer, to be run eagerly, compiled or as a CUDA
graph. On the CPU both are tiny, to try the programs out.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

VOCABULARY = 4096
CLASSES = 100


class Block(nn.Module):  # type: ignore[misc]
    """A transformer block with its normalisation first."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        batch, length, width = hidden.shape
        three = self.query_key_value(self.before_attention(hidden))
        query, key, value = (
            part.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for part in three.chunk(3, dim=-1)
        )
        attended = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.projection(attended.transpose(1, 2).reshape(batch, length, width))
        result: torch.Tensor = hidden + self.mlp(self.before_mlp(hidden))
        return result


class Gpt(nn.Module):  # type: ignore[misc]
    def __init__(self, layers: int, width: int, heads: int, length: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        scores = self.head(self.blocks(self.tokens(tokens) + self.positions(places)))
        return nn.functional.cross_entropy(
            scores[:, :-1].reshape(-1, VOCABULARY), tokens[:, 1:].reshape(-1)
        )


class BasicBlock(nn.Module):  # type: ignore[misc]
    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(channels_in, channels, 3, stride, 1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(inplace=True),
            nn.Conv2d(channels, channels, 3, 1, 1, bias=False),
            nn.BatchNorm2d(channels),
        )
        same = stride == 1 and channels_in == channels
        self.shortcut = nn.Identity() if same else nn.Conv2d(channels_in, channels, 1, stride)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return nn.functional.relu(self.main(images) + self.shortcut(images))


class ResNet(nn.Module):  # type: ignore[misc]
    """Blocks of two convolutions in four stages, as in ResNet-18 (He et al. 2015)."""

    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        stages: list[nn.Module] = [nn.Conv2d(3, width, 3, 1, 1)]
        channels = width
        for stage in range(4):
            wider = width << stage
            for block in range(blocks):
                stages.append(BasicBlock(channels, wider, 2 if stage and not block else 1))
                channels = wider
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(channels, CLASSES)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.head(self.stages(images).mean(dim=(2, 3)))
        labels = torch.zeros(len(images), dtype=torch.long, device=images.device)
        return nn.functional.cross_entropy(scores, labels)


def _gpt(device: str) -> tuple[nn.Module, torch.Tensor]:
    small = device == "cpu"
    layers, width, length, batch = (1, 32, 16, 2) if small else (8, 768, 512, 8)
    tokens = torch.randint(0, VOCABULARY, (batch, length), device=device)
    return Gpt(layers, width, 4 if small else 12, length), tokens


def _resnet(device: str) -> tuple[nn.Module, torch.Tensor]:
    small = device == "cpu"
    width, blocks, size, batch = (4, 1, 16, 2) if small else (64, 2, 64, 128)
    return ResNet(width, blocks), torch.randn(batch, 3, size, size, device=device)


NETWORKS: dict[str, Callable[[str], tuple[nn.Module, torch.Tensor]]] = {
    "gpt": _gpt,
    "resnet": _resnet,
}


class Workload:
    """``run`` is a whole step: forward, backward, optimizer. Mode ``graph`` needs CUDA."""

    def __init__(self, network: str, mode: str, device: str) -> None:
        torch.manual_seed(0)
        module, self.batch = NETWORKS[network](device)
        self.module = module.to(device)
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=1e-4, momentum=0.9)
        self.dtype = torch.bfloat16
        self.device = device
        self.forward: Callable[[torch.Tensor], torch.Tensor] = self.module
        if mode == "compile":
            self.forward = torch.compile(self.module)
        self.run = self._record() if mode == "graph" else self._step

    def _step(self) -> None:
        with torch.autocast(self.device, dtype=self.dtype):
            loss = self.forward(self.batch)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def _record(self) -> Callable[[], None]:
        """The whole step as one graph; warmed up on a side stream, as PyTorch asks for."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self._step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._step()
        replay: Callable[[], None] = graph.replay
        return replay
