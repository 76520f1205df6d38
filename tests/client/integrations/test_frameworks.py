"""Counting steps where frameworks make it hard, each with the real package in its own process."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from typing import Any

import pytest

from tests.client.daemon_side import ROOT, Folder

PREAMBLE = """
import copy, gc, json, pickle, tempfile, torch
from torch.utils.data import DataLoader, TensorDataset
from warpwatch import faults, hooks
from warpwatch.ring import SAMPLES, TOKENS

def counted():
    clock = hooks.install().monitor.clock
    samples, tokens = clock.totals[SAMPLES], clock.totals[TOKENS]
    return clock.steps, samples, tokens, sorted(clock.phase_names), faults.count()

reported = []
"""

LIGHTNING = """
from lightning.pytorch import LightningModule, Trainer
from warpwatch.integrations.lightning import WarpwatchCallback

class TwoOptimizers(LightningModule):
    automatic_optimization = False

    def __init__(self, fails_at=None):
        super().__init__()
        self.fails_at = fails_at
        self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)

    def training_step(self, batch, index):
        if index == self.fails_at:
            raise ValueError
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(self.second(self.first(batch[0])).sum())
            optimizer.step()

    def configure_optimizers(self):
        return [torch.optim.SGD(part.parameters(), lr=0.01) for part in (self.first, self.second)]

def fit(model, callback):
    trainer = Trainer(max_epochs=1, accelerator="cpu", callbacks=[callback], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    trainer.fit(model, DataLoader(TensorDataset(torch.randn(24, 4)), batch_size=4))

callback = pickle.loads(pickle.dumps(copy.deepcopy(WarpwatchCallback())))
fit(TwoOptimizers(), callback)
reported.append(counted())
try:
    fit(TwoOptimizers(fails_at=2), callback)
except ValueError:
    reported.append(counted()[:2])
fit(TwoOptimizers(), WarpwatchCallback())
reported.append(counted()[:2])
reported.append(callback.state_dict())
"""

TRANSFORMERS = """
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments
from warpwatch.integrations.transformers import WarpwatchCallback

class Fails(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 2:
            raise ValueError

def rows(count):
    # Of 16 tokens 6 are padding.
    mask = torch.tensor([1] * 10 + [0] * 6)
    ids = torch.randint(8, (count, 16))
    return [{"input_ids": row, "labels": row, "attention_mask": mask} for row in ids]

def train(*callbacks, epochs=1, **more):
    config = GPT2Config(vocab_size=8, n_positions=16, n_embd=8, n_layer=1, n_head=1,
        bos_token_id=0, eos_token_id=0)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(folder, per_device_train_batch_size=2, report_to="none",
            use_cpu=True, dataloader_pin_memory=False, save_strategy="no", disable_tqdm=True,
            num_train_epochs=epochs, logging_strategy="no", **more)
        trainer = Trainer(GPT2LMHeadModel(config), arguments, callbacks=list(callbacks),
            train_dataset=rows(20), eval_dataset=rows(6))
        trainer.train()
        trainer.evaluate()

callback = pickle.loads(pickle.dumps(copy.deepcopy(WarpwatchCallback())))
# 10 batches an epoch: 4 + 4 + 2.
train(callback, gradient_accumulation_steps=4, epochs=2)
reported.append(counted())
train(callback, include_num_input_tokens_seen="non_padding", max_steps=3)
reported.append(counted()[:3])
try:
    train(callback, Fails())
except ValueError:
    reported.append((*counted()[:3], hooks.install().monitor.step_clock))
train(WarpwatchCallback(), max_steps=3)
reported.append(counted()[:3])
"""

ACCELERATE = """
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from warpwatch.integrations.accelerate import watch

watch()
accelerator = Accelerator(cpu=True)
parts = torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)

# An overflow: the scaler skips the optimizer's step.
scaler = torch.amp.GradScaler("cpu")
scaled = AcceleratedOptimizer(torch.optim.SGD(parts[0].parameters(), lr=0.01), scaler=scaler)
scaler.scale(parts[1](parts[0](torch.full((4, 4), float("inf")))).sum()).backward()
scaled.step()
reported.append((scaled.step_was_skipped, counted()[0]))
del scaled
gc.collect()

first, second, loader = accelerator.prepare(
    *(torch.optim.SGD(part.parameters(), lr=0.01) for part in parts),
    DataLoader(TensorDataset(torch.randn(24, 4)), batch_size=4))
for (batch,) in loader:
    for optimizer in (first, second):
        optimizer.zero_grad()
        accelerator.backward(parts[1](parts[0](batch)).sum())
        optimizer.step()
reported.append(counted())
"""

DEEPSPEED = """
import deepspeed
from warpwatch.integrations.deepspeed import watch

watch()
model = torch.nn.Sequential(torch.nn.Linear(4, 64), torch.nn.Linear(64, 1))
engine, *_ = deepspeed.initialize(
    model=model,
    optimizer=torch.optim.Adam(model.parameters()),
    config={
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "bf16": {"enabled": True},
        # Several sub-groups: the optimizer is called for each of them.
        "zero_optimization": {"stage": 3, "sub_group_size": 100},
    })
for batch in DataLoader(torch.randn(24, 4).bfloat16(), batch_size=4):
    engine.backward(engine(batch).sum())
    engine.step()
reported.append(counted())
reported.append(hooks.install().monitor.step_clock)
"""

DISTRIBUTED = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "0",
    "DS_ACCELERATOR": "cpu",
    "GLOO_SOCKET_IFNAME": "lo",
}


def reported(
    folder: Folder, package: str, code: str, timeout_s: float = 120, **more: str
) -> list[Any]:
    """What the program put into ``reported``."""
    if find_spec(package) is None:
        pytest.skip(f"needs the package {package}")
    environ = folder.environment(PYTHONPATH=str(ROOT / "client"), OMP_NUM_THREADS="1", **more)
    done = subprocess.run(
        [sys.executable, "-c", f"{PREAMBLE}{code}\nprint(json.dumps(reported))"],
        env={**environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    assert done.returncode == 0, done.stderr
    found: list[Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.torch
def test_lightning_counts_several_optimizers_as_one_and_survives_errors_and_copies(
    folder: Folder,
) -> None:
    phases = ["backward", "data_wait", "forward", "h2d", "optimizer"]
    assert reported(folder, "lightning", LIGHTNING) == [
        [6, 24, 0, phases, 0],
        # Two steps more; the third failed.
        [8, 32],
        # The batch that failed was used by none.
        [14, 56],
        {},
    ]


@pytest.mark.torch
def test_the_hugging_face_trainer_counts_short_steps_tokens_and_a_training_after_a_failed_one(
    folder: Folder,
) -> None:
    phases = ["backward", "data_wait", "eval", "forward", "h2d", "optimizer"]
    assert reported(folder, "transformers", TRANSFORMERS) == [
        # Without evaluations: 2 epochs of 20 rows of 16 tokens.
        [6, 40, 640, phases, 0],
        # Steps of 2 rows, 10 tokens of each no padding; 2 rows were fetched ahead for no step.
        [9, 48, 700],
        # The end of the second step was reported to us before the callback that fails.
        [11, 54, 796, ""],
        [14, 62, 924],
    ]


@pytest.mark.torch
def test_accelerate_counts_two_optimizers_as_one_and_a_skipped_step(folder: Folder) -> None:
    phases = ["backward", "data_wait", "forward", "h2d", "optimizer"]
    assert reported(folder, "accelerate", ACCELERATE) == [[True, 1], [7, 24, 0, phases, 0]]


@pytest.mark.torch
@pytest.mark.loops
def test_deepspeed_counts_sub_groups_as_one(folder: Folder) -> None:
    """Not among the development dependencies: pip has to build it, and it builds an operator."""
    phases = ["backward", "comm", "data_wait", "forward", "optimizer"]
    found = reported(folder, "deepspeed", DEEPSPEED, timeout_s=300, **DISTRIBUTED)
    assert found == [[3, 24, 0, phases, 0], "deepspeed"]
