"""Measures what the shim adds to training programs on the CPU, with its calls and under `run`.

    python -m benchmarks.programs PROGRAM WAY

trains one program, with the shim in every second turn: so both ways have the same memory layout,
and other processes disturb both; the training thread's processor time leaves out its waits for a
core. It prints a line of JSON: the time of a batch, what the shim adds, the share of a step in
phases, and resident memory. WAY is `alone` (no shim at all), `calls`, or `run` if `warpwatch run`
started the process: then the turns without the shim take its hooks off.
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

import psutil
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader

from benchmarks.processes import at_least, at_most, is_quick, output_of, running_daemon

# The ways by program; ``alone`` has no shim and is what its memory is compared with.
WAYS: dict[str, tuple[str, ...]] = {
    "small": ("alone", "calls", "run"),
    "compiled": ("run",),
    "accumulated": ("run",),
    **dict.fromkeys(("dqn", "gpt"), ("calls", "run")),
}
MAX_US = {"calls": 10.0, "run": 20.0}
# The share of a step that is in phases; ``small`` is too short for it.
MIN_NAMED = 0.85
REAL_PROGRAMS = ("dqn", "gpt")
MAX_MEMORY_KIB = 4096.0
# The memory layout of a process shifts a figure by several µs.
ROUNDS = 5
TIMEOUT_S = 600.0

Row = dict[str, Any]


def measure() -> dict[str, Any]:
    """Return the figures. Raises CannotMeasure."""
    cases = [(name, way) for name, ways in WAYS.items() for way in ways]
    found: dict[tuple[str, str], list[dict[str, float]]] = {case: [] for case in cases}
    with running_daemon(sources={"nvml": {"enabled": False}}) as daemon:
        for _ in range(1 if is_quick() else ROUNDS):
            for case, rounds in found.items():
                rounds.append(_in_a_process(*case, daemon.training_environment))
    rows: dict[tuple[str, str], Row] = {}
    for case, rounds in found.items():
        row = {figure: statistics.median(one[figure] for one in rounds) for figure in rounds[0]}
        added_us = [one["added_cpu_us"] for one in rounds]
        rows[case] = row | {"added_cpu_us_range": [min(added_us), max(added_us)]}
    programs = {f"{way}_{name}": row for (name, way), row in rows.items()}
    return {"programs": programs, "limits": list(_limits(rows))}


def _limits(rows: dict[tuple[str, str], Row]) -> Iterator[dict[str, Any]]:
    alone_kib = rows["small", "alone"]["rss_kib"]
    for (name, way), row in rows.items():
        if way == "alone":
            continue
        what = f"{way}, {name}: µs of the processor added to a step"
        yield at_most(what, row["added_cpu_us"], MAX_US[way])
        if name in REAL_PROGRAMS:
            yield at_least(f"{way}, {name}: share of a step in phases", row["named"], MIN_NAMED)
        if name == "small":
            yield at_most(f"{way}: KiB a rank", row["rss_kib"] - alone_kib, MAX_MEMORY_KIB)


def _in_a_process(name: str, way: str, environment: dict[str, str]) -> dict[str, float]:
    run = ["-m", "warpwatch", "run", "--", sys.executable] if way == "run" else []
    arguments = [*run, "-m", "benchmarks.programs", name, way]
    figures: dict[str, float] = output_of(f"{way} {name}", arguments, environment, TIMEOUT_S)
    return figures


# --- in a process of its own ---

TURNS, QUICK_TURNS = 16, 4
# The batches of a turn last longer than 50 ms, after which the shim does its rare work. The first
# ones are ignored: they find the caches as the other way has left them.
STEPS, FIRST_STEPS = 64, 8
WARM_UP_STEPS = 150
ATTACH_TIMEOUT_S = 15.0


Step = Callable[[Any], None]


class Program(NamedTuple):
    """A model, its loss for a batch, its batches, and how many of them make one step."""

    model: Any
    loss: Callable[[Any, Any], torch.Tensor]
    batches: Iterator[Any]
    accumulated: int = 1


def network(*widths: int) -> torch.nn.Sequential:
    pairs = itertools.pairwise(widths)
    parts = [part for pair in pairs for part in (torch.nn.Linear(*pair), torch.nn.ReLU())]
    return torch.nn.Sequential(*parts[:-1])


class OneBatch(torch.utils.data.Dataset):  # type: ignore[misc]
    """The same batch again and again: loading takes almost no time."""

    def __init__(self) -> None:
        self._batch = torch.randn(32, 64)

    def __len__(self) -> int:
        return 10**9

    def __getitem__(self, index: int) -> torch.Tensor:
        return self._batch


def small() -> Program:
    """Return a perceptron whose steps take 0.2 to 0.3 ms."""
    batches = iter(DataLoader(OneBatch(), batch_size=None))
    return Program(network(64, 64, 1), lambda model, batch: model(batch).square().mean(), batches)


def compiled() -> Program:
    """Return ``small`` compiled by the back end that traces the graph and needs no compiler."""
    program = small()
    return program._replace(model=torch.compile(program.model, backend="eager"))


def accumulated() -> Program:
    """Return ``small`` with an optimizer step every fourth batch."""
    return small()._replace(accumulated=4)


def dqn() -> Program:
    """Return a DQN of CleanRL's size: ten turns in an environment, then a batch of its replay."""
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


def gpt() -> Program:
    """Return a small GPT with nanoGPT's get_batch."""
    text = torch.randint(65, (10_000,))
    block = torch.nn.TransformerEncoderLayer(64, 4, 256, 0.0, batch_first=True)
    model = torch.nn.Sequential(torch.nn.Embedding(65, 64), block, torch.nn.Linear(64, 65))

    def get_batch() -> torch.Tensor:
        starts = torch.randint(len(text) - 33, (4,))
        return torch.stack([text[start : start + 33] for start in starts])

    def loss(model: Any, rows: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())

    return Program(model, loss, iter(get_batch, None))


PROGRAMS = {one.__name__: one for one in (small, compiled, accumulated, dqn, gpt)}


class Hooks:
    """The shim's hooks in torch, which can be taken off and put back."""

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
    numbers = itertools.count(1)

    def step(batch: Any) -> None:
        program.loss(program.model, batch).backward()
        if next(numbers) % program.accumulated == 0:
            optimizer.step()
            optimizer.zero_grad()

    return step


def calls(program: Program, optimizer: Any) -> Step:
    import warpwatch

    monitor = warpwatch.attach()

    def step(batch: Any) -> None:
        with monitor.step(samples=32):
            with monitor.phase("forward"):
                loss = program.loss(program.model, batch)
            with monitor.phase("backward"):
                loss.backward()
            with monitor.phase("optimizer"):
                optimizer.step()
                optimizer.zero_grad()

    return step


def train(name: str, way: str) -> dict[str, float]:
    """Train in this process; return microseconds of a batch and what the shim adds."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    random.seed(0)
    program = PROGRAMS[name]()
    optimizer = torch.optim.Adam(program.model.parameters(), lr=1e-3)
    alone = plain(program, optimizer)
    observed = calls(program, optimizer) if way == "calls" else alone
    for batch in itertools.islice(program.batches, WARM_UP_STEPS):
        observed(batch)
    if way != "alone":
        _wait_for_ring(observed, program.batches)
    hooks = Hooks(program.model) if way == "run" else None
    spent: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    for turn in range(QUICK_TURNS if is_quick() else TURNS):
        for watched in (turn % 2 == 0, turn % 2 == 1):
            if hooks is not None and not watched:
                hooks.take_off()
            spent[watched].append(_turn(observed if watched else alone, program.batches))
            if hooks is not None and not watched:
                hooks.put_back()
    row = {"rss_kib": psutil.Process().memory_info().rss / 1024}
    for index, figure in enumerate(("step_us", "cpu_us")):
        without, with_shim = ([turn[index] for turn in spent[watched]] for watched in (False, True))
        row[figure] = statistics.median(without)
        # Neighbouring turns are compared: a drift of the processor's clock is in both.
        row[f"added_{figure}"] = statistics.median(map(operator.sub, with_shim, without))
    rounded = {figure: round(value, 1) for figure, value in row.items()}
    if way != "alone":
        rounded["named"] = round(_named(observed, program.batches), 3)
    return rounded


def _wait_for_ring(step: Step, batches: Iterator[Any]) -> None:
    """Train until the shim has found the daemon. Raises SystemExit after a timeout."""
    import warpwatch

    deadline = time.monotonic() + ATTACH_TIMEOUT_S
    while warpwatch.attach().clock.ring is None:
        if time.monotonic() > deadline:
            raise SystemExit("the shim found no daemon")
        step(next(batches))
        time.sleep(0.01)


def _named(step: Step, batches: Iterator[Any]) -> float:
    import warpwatch
    from warpwatch.ring import DURATION, FIRST_PHASE

    clock = warpwatch.attach().clock
    # The first step started before the turn that was not observed.
    _turn(step, batches)
    before = list(clock.totals)
    _turn(step, batches)
    spent_ns = [after - start for after, start in zip(clock.totals, before, strict=True)]
    return sum(spent_ns[FIRST_PHASE:]) / spent_ns[DURATION]


def _turn(step: Step, batches: Iterator[Any]) -> tuple[float, float]:
    """Return the microseconds of a batch: by the clock, and of the processor."""
    for batch in itertools.islice(batches, FIRST_STEPS):
        step(batch)
    clock_ns, cpu_ns = time.perf_counter_ns(), time.thread_time_ns()
    for batch in itertools.islice(batches, STEPS):
        step(batch)
    spent_ns = time.perf_counter_ns() - clock_ns, time.thread_time_ns() - cpu_ns
    return spent_ns[0] / STEPS / 1e3, spent_ns[1] / STEPS / 1e3


if __name__ == "__main__":
    print(json.dumps(train(*sys.argv[1:])))
