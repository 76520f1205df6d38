"""A tiny language model in a loop of its own with Accelerate.

    python examples/accelerate_loop.py

Or without ``watch()``, and without a change: ``python -m warpwatch run -- python
examples/accelerate_loop.py --plain``.
"""

from __future__ import annotations

import sys
import tempfile

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

VOCABULARY, LENGTH, BATCH, BATCHES = 64, 32, 8, 40


def main(plain: bool) -> None:
    torch.manual_seed(0)
    if not plain:
        from warpwatch.integrations.accelerate import watch

        watch()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    rows = [{"input_ids": ids} for ids in torch.randint(VOCABULARY, (BATCH * BATCHES, LENGTH))]
    model = torch.nn.Sequential(torch.nn.Embedding(VOCABULARY, 32), torch.nn.Linear(32, VOCABULARY))
    model, optimizer, loader = accelerator.prepare(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-2),
        DataLoader(rows, batch_size=BATCH, shuffle=True),  # type: ignore[arg-type]
    )
    for number, batch in enumerate(loader):
        with accelerator.accumulate(model):
            ids = batch["input_ids"]
            logits = model(ids[:, :-1])
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        if number == BATCHES // 2:
            with tempfile.TemporaryDirectory() as folder:
                accelerator.save_state(folder)
    print(f"loss {loss.item():.3f}")


if __name__ == "__main__":
    main(plain="--plain" in sys.argv)
