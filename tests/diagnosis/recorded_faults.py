"""Records small trainings with one injected fault each.

Every trace is ``<fault>-<model>.pt.trace.json.gz`` in FOLDER, as torch.profiler writes it. One
thread computes, so that other work on the machine only stretches the times.
"""

import argparse
import contextlib
import gc
import gzip
import itertools
import json
import multiprocessing
import os
import shutil
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, schedule
from torch.utils.data import DataLoader, Dataset, default_collate

from warpwatch_diagnosis.trace.events import KINDS

WARM_STEPS = 3
ACTIVE_STEPS = 4
CLASSES = 16
# The first time of reduced traces, far from 0, which means a lost clock.
ORIGIN_US = 1_700_000_000_000_000
MIN_FRAME_US = 200
# Large enough for a checkpoint that takes longer than a step of these models.
STATE_VALUES = 6_000_000
HEAP_OBJECTS = 400_000
CHECKED_LAYERS = 100
LOGGED_S = 0.12
ROLLOUT_STEPS = 48
# Each side of a pair is recorded this often by turns, and the least disturbed one is kept.
ROUNDS = 4
BATCH_SCALE = 2

FAULTS = (
    "healthy", "no_workers", "slow_collate", "tiny_operators", "item", "garbage_collection",
    "checkpoint", "recompilation", "graph_breaks", "logging",
)  # fmt: skip


class Model(nn.Module):  # type: ignore[misc]
    """A body, what makes one vector of its output, and a linear layer that classifies it."""

    def __init__(
        self, sample: tuple[int, ...], batch: int, body: Any, width: int, vector: Any = None
    ) -> None:
        super().__init__()
        self.sample, self.batch, self.vector = sample, batch, vector
        self.body, self.head = body, nn.Linear(width, CLASSES)

    def forward(self, given: Tensor) -> Tensor:
        given = self.body(given)
        return self.head(self.vector(given) if self.vector else given)


def perceptron() -> Model:
    layers = (nn.Sequential(nn.Linear(512, 512), nn.ReLU()) for _ in range(6))
    return Model((512,), 256, nn.Sequential(*layers), 512)


def convolutional() -> Model:
    layers = (
        nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU())
        for a, b in itertools.pairwise((3, 32, 32, 64))
    )
    return Model((3, 32, 32), 24, nn.Sequential(*layers), 64, lambda given: given.mean((2, 3)))


def transformer() -> Model:
    layers = (
        nn.TransformerEncoderLayer(128, 4, 256, dropout=0.0, batch_first=True) for _ in range(2)
    )
    return Model((64, 128), 16, nn.Sequential(*layers), 128, lambda given: given.mean(1))


def recurrent() -> Model:
    layers = nn.LSTM(64, 96, num_layers=2, batch_first=True)
    return Model((32, 64), 32, layers, 96, lambda given: given[0][:, -1])


class Adversarial(nn.Module):  # type: ignore[misc]
    """A GAN: the discriminator is ``forward``; Training steps the generator beside it."""

    sample = (256,)
    batch = 512

    def __init__(self) -> None:
        super().__init__()
        hidden = [nn.Linear(256, 384), nn.LeakyReLU(0.2), nn.Linear(384, 256), nn.LeakyReLU(0.2)]
        self.head = nn.Sequential(*hidden, nn.Linear(256, CLASSES))
        self.generator = nn.Sequential(
            nn.Linear(64, 384), nn.ReLU(), nn.Linear(384, 384), nn.ReLU(), nn.Linear(384, 256)
        )

    def forward(self, given: Tensor) -> Tensor:
        return self.head(given)


class Policy(Model):
    def __init__(self) -> None:
        layers = nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh()
        super().__init__((16,), 64, nn.Sequential(*layers), 64)

    def rollout(self, given: Tensor) -> Tensor:
        seen, state = [], given[0]
        for _ in range(ROLLOUT_STEPS):
            with torch.no_grad():
                chosen = torch.distributions.Categorical(logits=self(state[None])).sample().item()
            values = state.tolist()
            for _ in range(60):
                values = [0.99 * value + 0.01 * (chosen - 8) for value in values]
            state = torch.tensor(values)
            seen.append(state)
        return torch.stack(seen)


class Checked(nn.Module):  # type: ignore[misc]
    """A small layer that looks at its values, which no compiled graph can hold."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(CLASSES, CLASSES)

    def forward(self, given: Tensor) -> Tensor:
        given = self.layer(given)
        if not given.isfinite().all():
            raise FloatingPointError
        given = given.tanh()
        if given.sum() > given.numel():
            raise FloatingPointError
        if given.sum() < -given.numel():
            raise FloatingPointError
        return given


MODELS: dict[str, Callable[[], Any]] = {
    "perceptron": perceptron,
    "convolutional": convolutional,
    "transformer": transformer,
    "recurrent": recurrent,
    "adversarial": Adversarial,
    "policy": Policy,
}


class Samples(Dataset):  # type: ignore[misc]
    """Random samples; slow ones are unpacked and waited for, as from a network drive."""

    def __init__(self, shape: tuple[int, ...], slow: bool) -> None:
        self._samples = torch.randn(64, *shape)
        self._packed = zlib.compress(bytes(200_000)) if slow else None

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if self._packed is not None:
            zlib.decompress(self._packed)
            time.sleep(0.002)
        return self._samples[index % len(self._samples)], index % CLASSES


def slow_collate(samples: list[tuple[Tensor, int]]) -> Any:
    for sample, _ in samples:
        values = [min(1.0, max(-1.0, value)) for value in sample.flatten().tolist()]
        values.extend(0.0 for _ in range(20_000))
    return default_collate(samples)


@dataclass
class Training:
    """One model that is trained with one fault.

    ``scale``: a factor for loops; below 1 it makes traces of many small operators smaller. Batches
    shrink less.
    """

    fault: str
    model_name: str
    scale: float = 1.0

    def __post_init__(self) -> None:
        torch.manual_seed(7)
        self.model = MODELS[self.model_name]()
        self.shape = self.model.sample
        self.batch = int(min(1.0, BATCH_SCALE * self.scale) * self.model.batch)
        self.heap: list[dict[str, list[int]]] = []
        if self.fault == "garbage_collection":
            self.heap = [{"a": [k], "b": [k]} for k in range(HEAP_OBJECTS // 4)]
        if self.fault == "checkpoint":
            self.model.register_buffer("average", torch.zeros(STATE_VALUES))
        if self.fault == "graph_breaks":
            layers = [Checked() for _ in range(int(self.scale * CHECKED_LAYERS))]
            self.model = nn.Sequential(self.model, *layers)
        self.forward = self._compiled()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3)
        if self.model_name == "adversarial":
            self.second = torch.optim.Adam(self.model.generator.parameters(), lr=1e-3)
        self.sum = 0.0

    def _compiled(self) -> Any:
        """The backend needs no C++ compiler; what compiling costs dynamo is the same."""
        if self.fault not in ("recompilation", "graph_breaks"):
            return self.model
        torch._dynamo.reset()
        return torch.compile(self.model, backend="eager", dynamic=False)

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        yield from DataLoader(
            Samples(self.shape, slow=self.fault == "no_workers"),
            batch_size=self.batch,
            collate_fn=slow_collate if self.fault == "slow_collate" else None,
        )

    def step(self, number: int, given: Tensor, labels: Tensor) -> None:
        if self.fault == "recompilation":
            given, labels = given[number:], labels[number:]
        if self.model_name == "policy":
            given = self.model.rollout(given)
            labels = labels[: len(given)]
        if self.model_name == "adversarial":
            given = self._generated(given)
        scores = self.forward(given)
        loss = nn.functional.cross_entropy(scores, labels)
        if self.fault == "tiny_operators":
            loss = loss + self._moving_average(scores.detach().flatten())
        if self.fault == "item":
            self._read(scores.detach().flatten())
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.fault == "garbage_collection":
            gc.collect()
        if self.fault == "checkpoint":
            self._save()
        if self.fault == "logging":
            time.sleep(LOGGED_S)

    def _generated(self, given: Tensor) -> Tensor:
        """A step of the generator; then half of the discriminator's batch is generated."""
        made = self.model.generator(torch.randn(len(given), 64))
        labels = torch.zeros(len(made), dtype=torch.long)
        nn.functional.cross_entropy(self.model(made), labels).backward()
        self.second.step()
        self.second.zero_grad()
        return torch.where(torch.arange(len(given))[:, None] % 2 == 0, given, made.detach())

    def _moving_average(self, scores: Tensor) -> Tensor:
        average = torch.zeros(())
        for k in range(int(self.scale * 4_000)):
            average = average * 0.99 + scores[k % len(scores)] * 0.01
        return average

    def _read(self, scores: Tensor) -> None:
        """A metric that looks at every value by itself."""
        for k in range(int(self.scale * 8_000)):
            self.sum += scores[k % len(scores)].item()

    def _save(self) -> None:
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        with tempfile.TemporaryDirectory() as folder:
            torch.save(state, Path(folder) / "checkpoint.pt")


def record(training: Training, path: Path, stacks: bool) -> None:
    steps = schedule(wait=WARM_STEPS - 1, warmup=1, active=ACTIVE_STEPS, repeat=1)
    batches = itertools.islice(training.batches(), WARM_STEPS + ACTIVE_STEPS)
    with profile(
        activities=[ProfilerActivity.CPU],
        schedule=steps,
        with_stack=stacks,
        experimental_config=_collector_seen() if stacks else None,
    ) as profiler:
        for number, (given, labels) in enumerate(batches):
            training.step(number, given, labels)
            profiler.step()
    profiler.export_chrome_trace(str(path))


def _collector_seen() -> Any:
    """None before torch 2.9, which cannot record garbage collections."""
    from torch._C import _profiler

    with contextlib.suppress(TypeError):
        return _profiler._ExperimentalConfig(record_python_gc_info=True)
    return None


def reduce(path: Path, steps: int) -> None:
    """Leaves of the trace its last ``steps`` and what diagnosis reads of them, to a tenth of a µs.

    Python's frames are left if they last long enough to matter for a line.
    """
    trace = json.loads(gzip.decompress(path.read_bytes()))
    events = [e for e in trace["traceEvents"] if e.get("ph") == "X" and e["cat"] in KINDS]
    begins = sorted(e["ts"] for e in events if e["name"].startswith("ProfilerStep"))
    origin = begins[-steps]
    end = max(e["ts"] + e["dur"] for e in events if e["name"].startswith("ProfilerStep"))
    names = ("ph", "cat", "name", "pid", "tid")
    trace["traceEvents"] = [
        {name: e[name] for name in names}
        | {"ts": round(ORIGIN_US + e["ts"] - origin, 1), "dur": round(e["dur"], 1)}
        for e in events
        if origin <= e["ts"] < end and (e["cat"] != "python_function" or e["dur"] >= MIN_FRAME_US)
    ]
    text = json.dumps(trace, separators=(",", ":"))
    path.write_bytes(gzip.compress(text.encode(), 9, mtime=0))


def steps_us(path: Path) -> float:
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    return sum(float(e["dur"]) for e in events if e["name"].startswith("ProfilerStep#"))


SIZE, CULPRIT = 2, 1
RANK_FAULTS = ("healthy", "more_work", "shared_core", "slow_network")
RANK_MODELS = ("perceptron", "convolutional")
# The gradients of a large model: 256 MB over the loopback of one machine.
GRADIENTS = 64_000_000
# Longer than any step of the other rank, also on a machine that is busy with other work.
SLEEP_S = 0.8
# Programs that share the culprit's core; recordings of which the least disturbed one is kept.
NEIGHBOURS, RANK_ROUNDS = 2, 3


class RankTraining(Training):
    """One rank of a training whose last rank has more work, sleeps, or shares its core."""

    def __init__(self, fault: str, model_name: str, rank: int, scale: float = 1.0) -> None:
        super().__init__(fault, model_name, scale)
        self.rank = rank
        self.forward = DistributedDataParallel(self.model)
        self.gradients = torch.zeros(GRADIENTS if fault == "slow_network" else 1)

    def step(self, number: int, given: Any, labels: Any) -> None:
        if self.fault == "more_work" and self.rank == CULPRIT:
            for _ in range(3):
                self.model(given).sum().backward()
            self.optimizer.zero_grad()
        if self.fault == "sleeping" and self.rank == CULPRIT:
            time.sleep(SLEEP_S)
        super().step(number, given, labels)
        dist.all_reduce(self.gradients)


def record_ranks(folder: Path, fault: str, model: str, steps: int) -> None:
    """Files ``<fault>-<model>.rank<k>.pt.trace.json.gz``, each with the last ``steps``."""
    names = [f"{fault}-{model}.rank{rank}.pt.trace.json.gz" for rank in range(SIZE)]
    for _ in range(RANK_ROUNDS):
        with tempfile.TemporaryDirectory() as place:
            new = [Path(place) / name for name in names]
            _record_both(new, f"file://{place}/meeting", fault, model)
            for path in new:
                reduce(path, steps)
            if not (folder / names[0]).exists() or steps_us(new[0]) < steps_us(folder / names[0]):
                for path in new:
                    shutil.copy(path, folder)


def _record_both(paths: list[Path], meeting: str, fault: str, model: str) -> None:
    context = multiprocessing.get_context("spawn")
    ranks = [
        context.Process(target=_train, args=(rank, meeting, path, fault, model))
        for rank, path in enumerate(paths)
    ]
    count = NEIGHBOURS if fault == "shared_core" else 0
    neighbours = [context.Process(target=_compute) for _ in range(count)]
    for process in (*neighbours, *ranks):
        process.start()
    for process in ranks:
        process.join()
    for process in neighbours:
        process.kill()


def _train(rank: int, meeting: str, path: Path, fault: str, model: str) -> None:
    _use_core_of(rank)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", meeting, rank=rank, world_size=SIZE)
    record(RankTraining(fault, model, rank), path, stacks=False)
    dist.destroy_process_group()


def _compute() -> None:
    """Another program, on the culprit's core."""
    _use_core_of(CULPRIT)
    while True:
        pass


def _use_core_of(rank: int) -> None:
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=FAULTS)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--pairs", action="store_true", help="each also without its fault")
    parser.add_argument("--stacks", action="store_true")
    parser.add_argument("--ranks", action="store_true", help="faults of jobs of two ranks instead")
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--reduced", type=int, metavar="STEPS", help="keep the last steps only")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch._dynamo.config.recompile_limit = 64
    options.folder.mkdir(parents=True, exist_ok=True)
    if options.ranks:
        for fault, model in itertools.product(RANK_FAULTS, RANK_MODELS):
            record_ranks(options.folder, fault, model, options.reduced or ACTIVE_STEPS)
        return
    for fault, model in itertools.product(options.faults, options.models):
        named = {f"{fault}-{model}": fault}
        if options.pairs:
            named[f"{fault}-{model}-without"] = "healthy"
        for _, (name, injected) in itertools.product(range(ROUNDS**options.pairs), named.items()):
            path = options.folder / f"{name}.pt.trace.json.gz"
            new = path.with_name(f"new-{path.name}")
            record(Training(injected, model, options.scale), new, options.stacks)
            if options.reduced:
                reduce(new, options.reduced)
            if not path.exists() or steps_us(new) < steps_us(path):
                new.replace(path)
            new.unlink(missing_ok=True)
            gc.collect()


if __name__ == "__main__":
    main()
