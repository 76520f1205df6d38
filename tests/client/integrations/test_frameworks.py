"""Frameworks: where they make it hard to count steps, and the programs of examples/ as they are.

Tests of their reports with our code in them, without, and with both.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from importlib.util import find_spec
from typing import Any, NamedTuple

import pytest

from tests.client.daemon_side import Folder, Ring
from tests.client.fork_server import ROOT, ForkServer
from tests.waiting import eventually

pytestmark = pytest.mark.torch

PREAMBLE = """
import copy, gc, json, os, pickle, tempfile, torch
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
from warpwatch.hooks import frameworks
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

# A version of another form is one fault.
Other = type("Other", (), {"step": lambda self: "stepped"})
frameworks._steps(Other, "step", frameworks._Steps(hooks.install(), "", lambda one: one.gone))
assert Other().step() == "stepped"

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

# An example runs once for each argument. It stays then, so that the helper thread writes all.
STAY = """
import runpy, sys
script, *arguments = sys.argv[1:]
for argument in arguments:
    sys.argv = [script, argument]
    runpy.run_path(script, run_name="__main__")
print("trained", flush=True)
sys.stdin.read()
"""


class Expected(NamedTuple):
    script: str
    package: str
    step_clock: str
    steps: int
    samples: int
    tokens: int
    phases: set[str]


TRAINED = {"data_wait", "forward", "backward", "optimizer"}
PLAIN = Expected("plain_pytorch", "torch", "step()", 40, 320, 10240, TRAINED)
# Two batches a step.
FRAMEWORKS = [
    Expected("huggingface_trainer", "transformers", "transformers", 20, 160, 5120,
        TRAINED | {"h2d", "eval", "checkpoint"}),
    Expected("lightning_fit", "lightning", "lightning", 20, 320, 0,
        TRAINED | {"h2d", "eval", "checkpoint"}),
    Expected("accelerate_loop", "accelerate", "accelerate", 20, 320, 10240,
        TRAINED | {"h2d", "checkpoint"}),
]  # fmt: skip

# Return the servers of a package; ``hooks``: with the hooks, as under ``run``.
Servers = Callable[..., ForkServer]
IMPORTS = {
    "transformers": ("transformers.trainer", "transformers.models.gpt2.modeling_gpt2"),
    "lightning": ("lightning.pytorch",),
}


@pytest.fixture(scope="module")
def servers(with_hooks: ForkServer, with_torch: ForkServer) -> Iterator[Servers]:
    known: dict[tuple[str, bool], ForkServer] = {}
    with ExitStack() as stack:

        def find(package: str, hooks: bool = True) -> ForkServer:
            if find_spec(package) is None:
                pytest.skip(f"needs the package {package}")
            if (package, hooks) not in known:
                server = with_hooks if hooks else with_torch
                modules = IMPORTS.get(package, (package,))
                new = server.importing(*modules, HF_HUB_OFFLINE="1")
                known[package, hooks] = stack.enter_context(closing(new))
            return known[package, hooks]

        yield find


def reported(server: ForkServer, folder: Folder, code: str) -> list[Any]:
    code = f"{PREAMBLE}{code}\nprint(json.dumps(reported), flush=True)\nos._exit(0)"
    process = server.fork(code, environ=folder.environment(HF_HUB_OFFLINE="1"))
    output, errors = process.communicate()
    process.kill()
    assert process.returncode == 0, errors
    found: list[Any] = json.loads(output.splitlines()[-1])
    return found


def test_lightning_counts_two_optimizers_as_one(servers: Servers, folder: Folder) -> None:
    phases = ["backward", "data_wait", "forward", "h2d", "optimizer"]
    assert reported(servers("lightning"), folder, LIGHTNING) == [
        [6, 24, 0, phases, 0],
        # Two steps more; the third failed.
        [8, 32],
        # The batch that failed was used by none.
        [14, 56],
        {},
    ]


def test_transformers_counts_short_steps_and_tokens(servers: Servers, folder: Folder) -> None:
    phases = ["backward", "data_wait", "eval", "forward", "h2d", "optimizer"]
    assert reported(servers("transformers"), folder, TRANSFORMERS) == [
        # Without evaluations: 2 epochs of 20 rows of 16 tokens.
        [6, 40, 640, phases, 0],
        # Steps of 2 rows, 10 tokens of each no padding; 2 rows were fetched ahead for no step.
        [9, 48, 700],
        # The end of the second step was reported to us before the callback that fails.
        [11, 54, 796, ""],
        [14, 62, 924],
    ]


def test_accelerate_counts_two_optimizers_as_one(servers: Servers, folder: Folder) -> None:
    phases = ["backward", "data_wait", "forward", "h2d", "optimizer"]
    assert reported(servers("accelerate"), folder, ACCELERATE) == [[True, 1], [7, 24, 0, phases, 1]]


def check(server: ForkServer, folder: Folder, example: Expected, *arguments: str) -> None:
    script = ROOT / "examples" / f"{example.script}.py"
    trainings = len(arguments)
    steps = trainings * example.steps

    def reported(ring: Ring) -> bool:
        known = example.phases <= set(ring.metadata["phases"]) and ring.metadata["step_clock"]
        # The helper thread settles the last steps.
        return bool(known) and ring.header.totals.steps >= steps

    environ = folder.environment(HF_HUB_OFFLINE="1")
    process = server.fork(STAY, str(script), *arguments, environ=environ, folder=folder.path)
    try:
        assert "trained\n" in iter(process.stdout.readline, ""), process.communicate()[1]
        ring = eventually(lambda: next(filter(reported, folder.rings()), None))
    finally:
        process.kill()
    totals = ring.header.totals
    expected = (steps, trainings * example.samples, trainings * example.tokens)
    assert (totals.steps, totals.samples, totals.tokens) == expected
    assert (ring.metadata["step_clock"], ring.metadata["faults"]) == (example.step_clock, 0)
    spent_ns = dict(zip(ring.metadata["phases"], totals.phases_ns, strict=False))
    assert {phase for phase, ns in spent_ns.items() if ns > 0} == example.phases
    assert sum(spent_ns.values()) <= totals.duration_ns


def test_an_example_reports_what_it_trains(with_torch: ForkServer, folder: Folder) -> None:
    check(with_torch, folder, PLAIN, "")


@pytest.mark.loops
@pytest.mark.parametrize("example", FRAMEWORKS, ids=lambda example: example.script)
def test_a_frameworks_example_reports(servers: Servers, folder: Folder, example: Expected) -> None:
    """Callbacks without hooks."""
    check(servers(example.package, hooks=False), folder, example, "")


@pytest.mark.parametrize("example", FRAMEWORKS, ids=lambda example: example.script)
def test_code_and_hooks_report_same(servers: Servers, folder: Folder, example: Expected) -> None:
    check(servers(example.package), folder, example, "--plain", "")
