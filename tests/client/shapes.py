"""The shapes of public training programs, in one process each. Each has a loss a step."""

import contextlib
import itertools
import os
import sys
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, RandomSampler, SubsetRandomSampler, TensorDataset

# A step takes milliseconds: what a program does between its parts is then little.
WIDTH, BATCH, BLOCK, VOCABULARY = 256, 128, 32, 64


def network(*widths: int) -> torch.nn.Sequential:
    layers = [
        part
        for before, after in itertools.pairwise(widths)
        for part in (torch.nn.Linear(before, after), torch.nn.ReLU())
    ]
    return torch.nn.Sequential(*layers[:-1])


def loader(batches: int) -> DataLoader[Any]:
    rows = torch.randn(batches * BATCH, WIDTH)
    return DataLoader(TensorDataset(rows, rows.square().mean(1, keepdim=True)), BATCH, shuffle=True)


class LanguageModel(torch.nn.Module):  # type: ignore[misc]
    """A model that returns its logits and its loss, as nanoGPT and minGPT do."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCABULARY, 64)
        self.block = torch.nn.TransformerEncoderLayer(64, 4, 256, 0.1, batch_first=True)
        self.head = torch.nn.Linear(64, VOCABULARY)

    def forward(self, ids: Any, targets: Any) -> Any:
        mask = torch.nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        scores = self.head(self.block(self.embedding(ids), mask, is_causal=True))
        return scores, F.cross_entropy(scores.flatten(0, 1), targets.flatten())


# --- several networks and optimizers --------------------------------------------------------------


def gan() -> Iterator[float]:
    """dcgan: two backwards of the judge, its step, then the maker's."""
    judge, maker = network(WIDTH, WIDTH, WIDTH, 1), network(WIDTH, WIDTH, WIDTH, WIDTH)
    steppers = [torch.optim.Adam(net.parameters(), 2e-4, (0.5, 0.999)) for net in (judge, maker)]
    score = torch.nn.BCEWithLogitsLoss()
    ones, zeros = torch.ones(BATCH, 1), torch.zeros(BATCH, 1)
    for real, _ in loader(20):
        judge.zero_grad()
        score(judge(real), ones).backward()
        made = maker(torch.randn(BATCH, WIDTH))
        score(judge(made.detach()), zeros).backward()
        steppers[0].step()
        maker.zero_grad()
        loss = score(judge(made), ones)
        loss.backward()
        steppers[1].step()
        yield loss.item()


def optimizers_in_turn() -> Iterator[float]:
    """One for the matrices, one for the rest, at every step."""
    model = network(WIDTH, 2 * WIDTH, WIDTH, 1)
    matrices = [parameter for parameter in model.parameters() if parameter.ndim == 2]
    others = [parameter for parameter in model.parameters() if parameter.ndim != 2]
    steppers = [torch.optim.SGD(matrices, 1e-2, 0.9), torch.optim.AdamW(others, 1e-3)]
    schedules = [torch.optim.lr_scheduler.CosineAnnealingLR(one, 30) for one in steppers]
    for x, y in loader(30):
        loss = F.mse_loss(model(x), y)
        loss.backward()
        for optimizer, schedule in zip(steppers, schedules, strict=True):
            optimizer.step()
            schedule.step()
            optimizer.zero_grad(set_to_none=True)
        yield loss.item()


def folds() -> Iterator[float]:
    """Model, optimizer and loaders are new for each."""
    rows = loader(12).dataset
    for fold in torch.arange(len(rows)).chunk(3):
        held_out = set(fold.tolist())
        trained = [row for row in range(len(rows)) if row not in held_out]
        model = network(WIDTH, 2 * WIDTH, WIDTH, 1)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        for x, y in DataLoader(rows, BATCH, sampler=SubsetRandomSampler(trained)):
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            yield loss.item()
        with torch.no_grad():
            for x, _ in DataLoader(rows, BATCH, sampler=SubsetRandomSampler(fold)):
                model(x)


# --- batches of a DataLoader ----------------------------------------------------------------------


def accumulated_gradients() -> Iterator[float]:
    """Four batches a step, the last of which is left over, under autocast."""
    model = network(WIDTH, 2 * WIDTH, WIDTH, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for number, (x, y) in enumerate(loader(42), 1):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.mse_loss(model(x).float(), y)
        (loss / 4).backward()
        if number % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()
            yield loss.item()


def pack(sequences: list[Any]) -> dict[str, Any]:
    """Sequences of any length in one row, as Hugging Face's collator for flattening does."""
    lengths = torch.tensor([0, *(len(sequence) for sequence in sequences)])
    return {"input_ids": torch.cat(sequences)[None], "cu_seq_lens_q": lengths.cumsum(0).int()}


def packing() -> Iterator[float]:
    model = LanguageModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    sequences = [torch.randint(VOCABULARY, (20 + number % 30,)) for number in range(12 * 8)]
    for batch in DataLoader(sequences, batch_size=8, shuffle=True, collate_fn=pack):
        ids = batch["input_ids"]
        loss = model(ids[:, :-1], ids[:, 1:])[1]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()


class Autoencoder(torch.nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = network(WIDTH, WIDTH, 40), network(20, WIDTH, WIDTH)

    def forward(self, x: Any) -> Any:
        mean, variance = self.encoder(x).chunk(2, dim=1)
        return self.decoder(mean + torch.randn_like(mean) * (variance / 2).exp()), mean, variance


def vae() -> Iterator[float]:
    model = Autoencoder()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def loss_of(x: Any) -> Any:
        found, mean, variance = model(x)
        penalty = -0.5 * (1 + variance - mean.square() - variance.exp()).sum()
        return F.mse_loss(found, x, reduction="sum") + penalty

    train, test = loader(15), loader(5)
    for _ in range(2):
        model.train()
        for x, _ in train:
            optimizer.zero_grad()
            loss = loss_of(x)
            loss.backward()
            yield loss.item()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            for x, _ in test:
                loss_of(x)
            model.decoder(torch.randn(64, 20))


class Trainer:
    """minGPT's: batches without an end, callbacks."""

    def __init__(self, model: Any, dataset: Any, steps: int) -> None:
        self.model, self._dataset, self._steps = model, dataset, steps
        self.callbacks: list[Any] = []

    def run(self) -> None:
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        sampler = RandomSampler(self._dataset, replacement=True, num_samples=10**9)
        batches = DataLoader(self._dataset, batch_size=8, sampler=sampler)
        self.model.train()
        for ids, targets in itertools.islice(batches, self._steps):
            self.loss = self.model(ids, targets)[1]
            self.model.zero_grad(set_to_none=True)
            self.loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            optimizer.step()
            for callback in self.callbacks:
                callback(self)


def mingpt() -> list[float]:
    text = torch.randint(VOCABULARY, (500, BLOCK + 1))
    trainer = Trainer(LanguageModel(), TensorDataset(text[:, :-1], text[:, 1:]), 24)
    losses: list[float] = []

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def write(trainer: Trainer) -> None:
        losses.append(trainer.loss.item())
        if len(losses) % 10 == 0:
            trainer.model.eval()
            ids = torch.zeros(1, 1, dtype=torch.long)
            for _ in range(30):
                scores, _ = trainer.model(ids[:, -BLOCK:], ids[:, -BLOCK:])
                ids = torch.cat([ids, scores[:, -1:].softmax(-1)[0].multinomial(1)], 1)
            trainer.model.train()

    trainer.callbacks.append(write)
    trainer.run()
    return losses


class Engine(torch.nn.Module):  # type: ignore[misc]
    """Like DeepSpeed's: its optimizer steps on one flat copy of all parameters."""

    def __init__(self, module: Any, accumulated: int) -> None:
        super().__init__()
        self.module, self._accumulated, self._calls = module, accumulated, 0
        self._parameters_ = [*module.parameters()]
        self._flat = torch.cat([p.detach().flatten() for p in self._parameters_])
        self._optimizer = torch.optim.Adam([self._flat], lr=1e-3)

    def forward(self, x: Any) -> Any:
        return self.module(x)

    def backward(self, loss: Any) -> None:
        (loss / self._accumulated).backward()

    def step(self) -> None:
        self._calls += 1
        if self._calls % self._accumulated:
            return
        self._flat.grad = torch.cat([p.grad.flatten() for p in self._parameters_])
        self._optimizer.step()
        torch.nn.utils.vector_to_parameters(self._flat, self._parameters_)
        self.module.zero_grad()


def engine() -> list[float]:
    model = Engine(network(WIDTH, 2 * WIDTH, WIDTH, 1), 4)
    losses = []
    for x, y in loader(40):
        loss = F.mse_loss(model(x), y)
        model.backward(loss)
        model.step()
        losses.append(loss.item())
    return losses[::4]


# --- at a prompt ----------------------------------------------------------------------------------

CELLS = """
import torch; from torch.nn import functional as F; from tests.client.shapes import *
---
model, losses = network(WIDTH, 2 * WIDTH, WIDTH, 1), []
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
def train(steps):
    for x, y in loader(steps):
        loss = F.mse_loss(model(x), y)
        loss.backward(); optimizer.step(); optimizer.zero_grad(); losses.append(loss.item())
---
train(15)
---
with torch.no_grad():
    for x, _ in loader(5):
        model(x)
---
train(15)
"""


def notebook() -> list[float]:
    """Cells of IPython's shell, as a kernel runs them."""
    os.environ["IPYTHONDIR"] = sys.argv[1]
    shell: Any = import_module("IPython.core.interactiveshell").InteractiveShell()
    with contextlib.redirect_stdout(sys.stderr):
        for cell in CELLS.split("---"):
            shell.run_cell(cell).raise_error()
    losses: list[float] = shell.user_ns["losses"]
    return losses
