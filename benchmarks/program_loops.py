"""Real programs of 1 to 4 ms a step, with the shim in every second turn.

    python -m benchmarks.program_loops PROGRAM WAY

prints what a step takes, what the shim adds, and which share of a step it has names for, as a line
of JSON. WAY is `calls`, or `run` where
`warpwatch run` has started the process: its hooks are taken off and put back.
"""

from __future__ import annotations

import copy
import itertools
import json
import operator
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader

from benchmarks.processes import is_quick

TURNS, QUICK_TURNS = 16, 4
# Of a turn, long enough for what the shim does every 50 ms; the first steps find the caches as the
# other way has left them, and do not count.
STEPS, FIRST_STEPS = 64, 8
WARM_UP_STEPS = 150


Step = Callable[[Any], None]


class Program(NamedTuple):
    """``loss``: of the model and a batch."""

    model: Any
    loss: Callable[[Any, Any], torch.Tensor]
    batches: Iterator[Any]


def network(*widths: int) -> torch.nn.Sequential:
    pairs = itertools.pairwise(widths)
    parts = [part for pair in pairs for part in (torch.nn.Linear(*pair), torch.nn.ReLU())]
    return torch.nn.Sequential(*parts[:-1])


def dqn() -> Program:
    """Of the size of CleanRL's: ten turns in an environment, then one batch of a replay buffer."""
    online = network(4, 120, 84, 2)
    target = copy.deepcopy(online)
    world, observed = torch.randn(5, 4), torch.zeros(1, 4)
    replay = torch.zeros(10_000, 10)  # state, next state, reward, action

    def act(model: Any, turn: int) -> None:
        nonlocal observed
        is_random = random.random() < 0.05
        chosen = random.randrange(2) if is_random else int(model(observed).argmax())
        action = torch.full((1, 1), float(chosen))
        following = torch.tanh(torch.cat([observed, action], 1) @ world)
        row = torch.cat([observed, following, following[:, :1], action], 1)
        replay[turn % len(replay)] = row
        observed = following

    def loss(model: Any, turn: int) -> torch.Tensor:
        for number in range(10):
            act(model, 10 * turn + number)
        drawn = replay[torch.randint(min(10 * turn + 10, len(replay)), (128,))]
        with torch.no_grad():
            wanted = drawn[:, 8] + 0.99 * target(drawn[:, 4:8]).amax(1)
        return F.mse_loss(model(drawn[:, :4]).gather(1, drawn[:, 9:].long())[:, 0], wanted)

    return Program(online, loss, itertools.count())


class Autoencoder(torch.nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = network(784, 200, 40), network(20, 200, 784)

    def forward(self, x: torch.Tensor) -> Any:
        mean, variance = self.encoder(x).chunk(2, 1)
        drawn = mean + torch.randn_like(mean) * (variance / 2).exp()
        return torch.sigmoid(self.decoder(drawn)), mean, variance


def vae() -> Program:
    """Half as wide as pytorch/examples' and with half of its batch: one thread trains it."""

    batches = DataLoader(torch.rand(6400, 784), batch_size=64)
    epochs = itertools.chain.from_iterable(itertools.repeat(batches))

    def loss(model: Any, batch: torch.Tensor) -> torch.Tensor:
        found, mean, variance = model(batch)
        penalty = -0.5 * (1 + variance - mean.square() - variance.exp()).sum()
        return F.binary_cross_entropy(found, batch, reduction="sum") + penalty

    return Program(Autoencoder(), loss, epochs)


def gpt() -> Program:
    """A small one with nanoGPT's get_batch."""
    text = torch.randint(65, (10_000,))
    block = torch.nn.TransformerEncoderLayer(64, 4, 256, 0.0, batch_first=True)
    model = torch.nn.Sequential(torch.nn.Embedding(65, 64), block, torch.nn.Linear(64, 65))

    def get_batch() -> torch.Tensor:
        starts = torch.randint(len(text) - 33, (4,))
        return torch.stack([text[start : start + 33] for start in starts])

    def loss(model: Any, rows: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())

    return Program(model, loss, iter(get_batch, None))


PROGRAMS = {program.__name__: program for program in (dqn, vae, gpt)}


class Hooks:
    """What the shim has put into torch, to take off and to put back."""

    def __init__(self, model: torch.nn.Module) -> None:
        from torch.optim import optimizer
        from torch.utils.data import dataloader

        owners = ((torch.autograd, "backward"), (dataloader._BaseDataLoaderIter, "__next__"))
        self._wrapped = [(owner, name, getattr(owner, name)) for owner, name in owners]
        kinds: set[Any] = set(map(type, model.modules()))
        called = [(kind, vars(kind).get("__call__")) for kind in kinds]
        self._called = [(kind, call) for kind, call in called if hasattr(call, "of_warpwatch")]
        registers = optimizer._global_optimizer_pre_hooks, optimizer._global_optimizer_post_hooks
        self._registers = [(register, dict(register)) for register in registers]

    def take_off(self) -> None:
        for owner, name, wrapper in self._wrapped:
            setattr(owner, name, wrapper.__wrapped__)
        for kind, _ in self._called:
            del kind.__call__
        for register, _ in self._registers:
            register.clear()

    def put_back(self) -> None:
        for owner, name, wrapper in self._wrapped:
            setattr(owner, name, wrapper)
        for kind, call in self._called:
            kind.__call__ = call
        for register, hooks in self._registers:
            register.update(hooks)


def plain(program: Program, optimizer: Any) -> Step:
    def step(batch: Any) -> None:
        loss = program.loss(program.model, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def calls(program: Program, optimizer: Any) -> Step:
    import warpwatch

    monitor = warpwatch.attach()

    def step(batch: Any) -> None:
        with monitor.step(samples=32):
            with monitor.phase("forward"):
                loss = program.loss(program.model, batch)
            optimizer.zero_grad()
            with monitor.phase("backward"):
                loss.backward()
            with monitor.phase("optimizer"):
                optimizer.step()

    return step


def train(name: str, way: str) -> dict[str, float]:
    """In a process of its own: microseconds of a step, what the shim adds, and what it names."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    random.seed(0)
    program = PROGRAMS[name]()
    optimizer = torch.optim.Adam(program.model.parameters(), lr=1e-3)
    alone = plain(program, optimizer)
    observed = calls(program, optimizer) if way == "calls" else alone
    for batch in itertools.islice(program.batches, WARM_UP_STEPS):
        observed(batch)
    hooks = Hooks(program.model) if way == "run" else None
    spent: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    for turn in range(QUICK_TURNS if is_quick() else TURNS):
        for watched in (turn % 2 == 0, turn % 2 == 1):
            if hooks is not None and not watched:
                hooks.take_off()
            spent[watched].append(_turn(observed if watched else alone, program.batches))
            if hooks is not None and not watched:
                hooks.put_back()
    row: dict[str, float] = {}
    for index, figure in enumerate(("step_us", "cpu_us")):
        without, with_shim = ([turn[index] for turn in spent[watched]] for watched in (False, True))
        row[figure] = statistics.median(without)
        # Of neighbouring turns: what drifts, as the clock of a processor does, hits both.
        row[f"added_{figure}"] = statistics.median(map(operator.sub, with_shim, without))
    rounded = {figure: round(value, 1) for figure, value in row.items()}
    return rounded | {"named": round(_named(observed, program.batches), 3)}


def _named(step: Step, batches: Iterator[Any]) -> float:
    """Return the share of the steps' time that is in a phase."""
    import warpwatch
    from warpwatch.ring import DURATION, FIRST_PHASE

    clock = warpwatch.attach().clock
    # The first step began before what was not observed.
    _turn(step, batches)
    before = list(clock.totals)
    _turn(step, batches)
    spent_ns = [after - start for after, start in zip(clock.totals, before, strict=True)]
    return sum(spent_ns[FIRST_PHASE:]) / spent_ns[DURATION]


def _turn(step: Step, batches: Iterator[Any]) -> tuple[float, float]:
    """Microseconds a step, by the clock and of the processor."""
    for batch in itertools.islice(batches, FIRST_STEPS):
        step(batch)
    clock_ns, cpu_ns = time.perf_counter_ns(), time.thread_time_ns()
    for batch in itertools.islice(batches, STEPS):
        step(batch)
    spent_ns = time.perf_counter_ns() - clock_ns, time.thread_time_ns() - cpu_ns
    return spent_ns[0] / STEPS / 1e3, spent_ns[1] / STEPS / 1e3


if __name__ == "__main__":
    print(json.dumps(train(*sys.argv[1:])))
