"""The shapes of programs of a framework. Each has a loss a step."""

import contextlib
import sys
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import torch
from torch.nn import functional as F

from tests.client.shapes import BLOCK, VOCABULARY, WIDTH, loader, network


def generation() -> list[float]:
    """GRPO: it learns of what it has written to a prompt itself. A step is a batch of four."""
    hf: Any = import_module("transformers")
    losses: list[float] = []

    class Learner(hf.Trainer):  # type: ignore[misc]
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **more: Any) -> Any:
            ids = model.generate(inputs["input_ids"], max_new_tokens=16, do_sample=True)
            loss = super().compute_loss(model, {"input_ids": ids, "labels": ids})
            losses.append(loss.item())
            return loss

    ends = {"bos_token_id": 0, "eos_token_id": 0}
    size = {"n_positions": BLOCK, "n_embd": 128, "n_layer": 2, "n_head": 4}
    model = hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=VOCABULARY, **size, **ends))
    arguments = hf.TrainingArguments(
        sys.argv[1],
        per_device_train_batch_size=4,
        num_train_epochs=1,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        dataloader_pin_memory=False,
        remove_unused_columns=False,
    )
    prompts = [{"input_ids": row} for row in torch.randint(1, VOCABULARY, (80, 4))]
    with contextlib.redirect_stdout(sys.stderr):
        Learner(model, arguments, train_dataset=prompts).train()
    return losses


def fabric() -> Iterator[float]:
    engine = import_module("lightning.fabric").Fabric(accelerator="cpu", devices=1)
    model = network(WIDTH, 2 * WIDTH, WIDTH, 1)
    model, optimizer = engine.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    for x, y in engine.setup_dataloaders(loader(40)):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        engine.backward(loss)
        optimizer.step()
        yield loss.item()
