"""Two networks with a batch and an optimizer, to be trained on a GPU; on the CPU both are tiny."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

VOCABULARY = 4096


def _perceptron() -> tuple[list[nn.Module], torch.Tensor]:
    """Launching its kernels takes longer than running them: all that the shim does is seen."""
    return [nn.Linear(64, 64) for _ in range(4)], torch.randn(32, 64)


def _transformer(small: bool) -> tuple[list[nn.Module], torch.Tensor]:
    layers, width, heads, length, batch = (1, 32, 1, 16, 2) if small else (8, 768, 12, 512, 32)
    blocks = [
        nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        for _ in range(layers)
    ]
    tokens = torch.randint(0, VOCABULARY, (batch, length))
    return [nn.Embedding(VOCABULARY, width), *blocks, nn.Linear(width, VOCABULARY)], tokens


class TrainedNetwork:
    """``phases`` are the parts of a step in their order; a CUDA graph has only one.

    network: perceptron, transformer. mode: eager, compile, graph.
    """

    def __init__(self, network: str, mode: str, device: str) -> None:
        if device == "cpu":
            torch.set_num_threads(1)
        torch.manual_seed(0)
        layers, batch = _perceptron() if network == "perceptron" else _transformer(device == "cpu")
        self.device, self.batch = device, batch.to(device)
        self.layers = nn.Sequential(*layers).to(device)
        self._call = torch.compile(self.layers) if mode == "compile" else self.layers
        self._optimizer = torch.optim.SGD(self.layers.parameters(), lr=1e-6, momentum=0.9)
        self.phases: dict[str, Callable[[], None]] = {
            "forward": self._forward,
            "backward": lambda: self._loss.backward(),
            "optimizer": self._update,
        }
        if mode == "graph":
            self.phases = {"forward": self._record().replay}

    def step(self) -> None:
        for work in self.phases.values():
            work()

    def _forward(self) -> None:
        with torch.autocast(self.device, dtype=torch.bfloat16):
            self._loss: torch.Tensor = self._call(self.batch).square().mean()

    def _update(self) -> None:
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    def _record(self) -> torch.cuda.CUDAGraph:
        """The whole step as one graph; warmed up on a side stream, as PyTorch asks for."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self.step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.step()
        return graph
