"""A training script that knows nothing of Warpwatch: run plain, and under ``run``, it is the same.

Two optimizers, gradients of four batches, autocast and a scaler on the CPU, two workers that load
the data, an evaluation and a checkpoint every 50 steps. Prints the digest of all losses.
"""

import hashlib
import os
import sys

import torch
from torch.utils.data import DataLoader, Dataset

STEPS, ACCUMULATED, EVERY = 120, 4, 50
WIDTH, BATCH = 384, 32


class Squares(Dataset[tuple[torch.Tensor, torch.Tensor]]):  # type: ignore[misc]
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        x = torch.randn(WIDTH, generator=generator)
        return x, 2 * x.square().mean()


def evaluate(model: torch.nn.Module, data: DataLoader[tuple[torch.Tensor, torch.Tensor]]) -> float:
    model.eval()
    with torch.no_grad():
        losses: list[float] = [
            torch.nn.functional.mse_loss(model(x).squeeze(1), y).item() for x, y in data
        ]
    model.train()
    return sum(losses) / len(losses)


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    body = torch.nn.Sequential(torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.GELU())
    head = torch.nn.Linear(4 * WIDTH, 1)
    model = torch.nn.Sequential(body, head)
    optimizers = [
        torch.optim.AdamW(body.parameters(), lr=1e-3),
        torch.optim.SGD(head.parameters(), lr=1e-2, momentum=0.9),
    ]
    # Its scale overflows at first: the steps that it skips count as well.
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, backoff_factor=2.0**-20)
    train = DataLoader(Squares(STEPS * ACCUMULATED * BATCH), batch_size=BATCH, num_workers=2)
    test = DataLoader(Squares(4 * BATCH), batch_size=BATCH)
    digest = hashlib.sha256()
    step = 0
    for number, (x, y) in enumerate(train, 1):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = torch.nn.functional.mse_loss(model(x).squeeze(1).float(), y)
        scaler.scale(loss / ACCUMULATED).backward()
        digest.update(repr(loss.item()).encode())
        if number % ACCUMULATED:
            continue
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        for optimizer in optimizers:
            optimizer.zero_grad()
        step += 1
        if step % EVERY == 0:
            print(f"step {step}: {evaluate(model, test)!r}")
            torch.save(model.state_dict(), os.path.join(sys.argv[1], "model.pt"))
    print("losses", digest.hexdigest(), "scale", scaler.get_scale(), file=sys.stderr)
    sys.exit(3)


if __name__ == "__main__":
    main()
