"""A tiny language model, trained by the Hugging Face Trainer with our callback.

    python examples/huggingface_trainer.py

Or without it, and without a change: ``python -m warpwatch run -- python
examples/huggingface_trainer.py --plain``.
"""

from __future__ import annotations

import os
import sys
import tempfile

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

VOCABULARY, LENGTH, BATCH, STEPS = 64, 32, 4, 20


def sequences(count: int) -> list[dict[str, torch.Tensor]]:
    return [{"input_ids": ids, "labels": ids} for ids in torch.randint(VOCABULARY, (count, LENGTH))]


def main(plain: bool) -> None:
    torch.manual_seed(0)
    callbacks = []
    if not plain:
        from warpwatch.integrations.transformers import WarpwatchCallback

        callbacks.append(WarpwatchCallback())
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=LENGTH,
        n_embd=32,
        n_layer=2,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
    )
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=STEPS,
            per_device_train_batch_size=BATCH,
            gradient_accumulation_steps=2,
            eval_strategy="steps",
            eval_steps=10,
            save_steps=10,
            logging_steps=10,
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
            dataloader_pin_memory=False,
        )
        trainer = Trainer(
            model=GPT2LMHeadModel(config),
            args=arguments,
            train_dataset=sequences(2 * BATCH * STEPS),
            eval_dataset=sequences(16),
            callbacks=callbacks,
        )
        trainer.train()


if __name__ == "__main__":
    main(plain="--plain" in sys.argv)
