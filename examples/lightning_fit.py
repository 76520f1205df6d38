"""A tiny classifier, trained by Lightning with our callback.

    python examples/lightning_fit.py

Or without it, and without a change: ``python -m warpwatch run -- python
examples/lightning_fit.py --plain``.
"""

from __future__ import annotations

import sys
import tempfile

import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader, TensorDataset

FEATURES, CLASSES, BATCH, BATCHES = 16, 4, 8, 40


class Classifier(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(FEATURES, 64), torch.nn.ReLU(), torch.nn.Linear(64, CLASSES)
        )

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        features, labels = batch
        return torch.nn.functional.cross_entropy(self.net(features), labels)

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        self.log("validation_loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def loader(batches: int, shuffle: bool = False) -> DataLoader[tuple[torch.Tensor, ...]]:
    count = batches * BATCH
    data = TensorDataset(torch.randn(count, FEATURES), torch.randint(CLASSES, (count,)))
    return DataLoader(data, batch_size=BATCH, shuffle=shuffle)


def main(plain: bool) -> None:
    torch.manual_seed(0)
    callbacks = []
    if not plain:
        from warpwatch.integrations.lightning import WarpwatchCallback

        callbacks.append(WarpwatchCallback())
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            max_epochs=1,
            accelerator="cpu",
            accumulate_grad_batches=2,
            val_check_interval=20,
            default_root_dir=folder,
            callbacks=callbacks,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(Classifier(), loader(BATCHES, shuffle=True), loader(4))
        print(f"{trainer.global_step} steps")


if __name__ == "__main__":
    main(plain="--plain" in sys.argv)
