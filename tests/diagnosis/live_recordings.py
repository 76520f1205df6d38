"""Records small trainings with torch.profiler now: ``-m tests.diagnosis.live_recordings FOLDER``.

One process imports torch; the two ranks of a gloo training are forked from it before it computes.
"""

import json
import multiprocessing
import sys
from pathlib import Path

import torch

# Imported on first use otherwise, in each rank again.
import torch._dynamo
import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from tests.diagnosis.recorded_faults import SIZE, RankTraining, Training, record

WIDTH, LENGTH = 64, 32


class Attention(nn.Module):  # type: ignore[misc]
    """PyTorch does not count its fused attention on the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.out((q @ k.transpose(1, 2)).softmax(-1) @ v)


def programs() -> dict[str, tuple[nn.Module, Tensor]]:
    # Without groups: torch's counter forgets them in the gradient of the weight.
    layers = (
        nn.Conv2d(4, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 16, 3, stride=2), nn.ReLU(),
        nn.ConvTranspose2d(16, 6, 2, stride=2),
    )  # fmt: skip
    return {
        "convolutional": (nn.Sequential(*layers), torch.randn(3, 4, 17, 17)),
        "attention": (Attention(), torch.randn(2, LENGTH, WIDTH)),
    }


def record_flops(folder: Path) -> None:
    """Write a trace with shapes for each program, and what PyTorch counts in it."""
    counted = {}
    for name, (model, given) in programs().items():
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
            model(given).square().mean().backward()
        profiler.export_chrome_trace(str(folder / f"{name}.json"))
        with FlopCounterMode(display=False) as counter:
            model(given).square().mean().backward()
        counted[name] = counter.get_total_flops()
    (folder / "flops.json").write_text(json.dumps(counted))


def train(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/meeting", rank=rank, world_size=SIZE)
    for fault in ("no_workers", "sleeping"):
        # A batch of few samples, each with a fixed wait.
        training = RankTraining(fault, "perceptron", rank, scale=0.05)
        record(training, folder / f"{fault}.rank{rank}.pt.trace.json.gz", stacks=False)
    dist.destroy_process_group()


def main(folder: Path) -> None:
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=train, args=(rank, folder)) for rank in range(SIZE)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    if any(process.exitcode for process in ranks):
        sys.exit("a rank failed")
    torch.set_num_threads(1)
    record_flops(folder)
    for fault in ("checkpoint", "item"):
        training = Training(fault, "perceptron", scale=0.1)
        record(training, folder / f"{fault}.pt.trace.json.gz", stacks=False)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
