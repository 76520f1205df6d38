"""A plain PyTorch loop that tells its steps and phases itself.

    python examples/plain_pytorch.py

Without those calls it would be ``python -m warpwatch run -- python train.py``.
"""

from __future__ import annotations

import torch
from torch.utils.data import DataLoader, TensorDataset

import warpwatch

VOCABULARY, LENGTH, BATCH = 64, 32, 8


def main() -> None:
    torch.manual_seed(0)
    data = TensorDataset(torch.randint(VOCABULARY, (40 * BATCH, LENGTH)))
    loader = DataLoader(data, batch_size=BATCH, shuffle=True)
    model = torch.nn.Sequential(torch.nn.Embedding(VOCABULARY, 32), torch.nn.Linear(32, VOCABULARY))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    monitor = warpwatch.attach(job="plain-pytorch")
    for (ids,) in monitor.wrap(loader):  # data_wait
        with monitor.step(samples=len(ids), tokens=ids.numel()):
            with monitor.phase("forward"):
                logits = model(ids[:, :-1])
                loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
            with monitor.phase("backward"):
                loss.backward()
            with monitor.phase("optimizer"):
                optimizer.step()
                optimizer.zero_grad()
    print(f"loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
