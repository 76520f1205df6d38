"""Judges the detectors on jobs whose ranks differ from the first step; needs no evaluation folder.

In some jobs one rank is slow: it must be named within HORIZON steps. In the others the ranks are
uneven by construction, and any alarm is false. Jobs have 8 to 64 ranks, half of them with reported
places, and steps like those of the evaluation folder: shared and own noise, drift, lone pauses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

from warpwatch_detection.replay import LogReplay
from warpwatch_telemetry.records import RankSeen, Record, Step

# Enough steps for each rank to get a baseline of its own, and a margin.
STEPS = 160
HORIZON = 30
RANKS = (8, 16, 32, 64)
SLOW = (0.10, 0.20, 0.30)
# The factor on a rank's time by step and rank, the places of the ranks, and the tokens of each rank
# (0: not counted).
Job = tuple[Callable[[int, int], float], Callable[[int], dict[str, tuple[int, int]]], list[int]]


def measure(runs: int, first_seed: int) -> dict[str, Any]:
    """Return the figures of ``runs`` jobs of each kind, in the form of the evaluation folder."""
    cases = {f"start/slow{size:.0%}": slow_runs(runs, first_seed, size) for size in SLOW}
    for kind in UNEVEN:
        cases[f"start/{kind}/none"] = uneven_runs(runs, first_seed, kind)
    return {"seeds": runs, "first_seed": first_seed, "cases": cases, "summary": {}}


def slow_runs(runs: int, first_seed: int, size: float) -> dict[str, Any]:
    delays, misnamed = [], 0
    for seed in range(first_seed, first_seed + runs):
        chance, ranks = Random(f"slow {size} {seed}"), RANKS[seed % len(RANKS)]
        slow = chance.randrange(ranks)
        alarms = list(raised(chance, slow_job(ranks, slow, size, chance.random() < 0.5)))
        right = [step for step, kind, rank in alarms if (kind, rank) == ("straggler", slow)]
        misnamed += len(alarms) - len(right)
        delays += [step for step in right[:1] if step <= HORIZON]
    return row(runs, sorted(delays), misnamed, 0)


def slow_job(ranks: int, slow: int, size: float, known: bool) -> Job:
    places = copies(ranks) if known else nothing
    return lambda step, rank: 1 + size * (rank == slow), places, [0] * ranks


def uneven_runs(runs: int, first_seed: int, kind: str) -> dict[str, Any]:
    false = 0
    for seed in range(first_seed, first_seed + runs):
        chance = Random(f"{kind} {seed}")
        false += len(list(raised(chance, UNEVEN[kind](chance, RANKS[seed % len(RANKS)]))))
    return row(runs, [], 0, false)


def row(runs: int, delays: list[int], misnamed: int, false: int) -> dict[str, Any]:
    found = {"runs": runs, "found": len(delays), "misnamed": misnamed, "false": false}
    middle, late = (delays[int(len(delays) * part)] if delays else None for part in (0.5, 0.95))
    return {**found, "delay_p50": middle, "delay_p95": late}


# --- jobs that are uneven by construction ---


def stages(chance: Random, ranks: int, known: bool = True, count: int = 4) -> Job:
    """Return a pipeline: an embedding first, a head last, and layers that divide unevenly."""
    times = [1.15, *(chance.uniform(0.9, 1.1) for _ in range(count - 2)), 1.35]
    part = ranks // count
    places = lambda r: {"pipeline": (r // part, count), "data": (r % part, part)}  # noqa: E731
    return lambda step, rank: times[rank // part], places if known else nothing, [0] * ranks


def experts(chance: Random, ranks: int, sets: int = 0) -> Job:
    """Return experts with uneven shares of the tokens, for each rank or for ``sets`` of ranks."""
    sets = sets or ranks
    times = [math.exp(chance.gauss(0, 0.15)) for _ in range(sets)]
    places = lambda r: {"expert": (r % sets, sets), "data": (r, ranks)}  # noqa: E731
    return lambda step, rank: times[rank % sets], places, [0] * ranks


def work(chance: Random, ranks: int) -> Job:
    """Return ranks with uneven tokens, whose cost is not quite proportional."""
    tokens = [chance.choice((4096, 6144, 8192)) for _ in range(ranks)]
    exponent = chance.gauss(1, 0.15)
    return lambda step, rank: (tokens[rank] / 6144) ** exponent, copies(ranks), tokens


def logging(chance: Random, ranks: int) -> Job:
    """Return a job whose rank 0 logs a little in each step and more now and then."""
    period, extra = chance.choice((5, 10, 50)), chance.uniform(0.3, 2.0)
    places = chance.choice((copies(ranks), nothing))
    return lambda s, r: 1 + (r == 0) * (0.06 + extra * (s % period == 0)), places, [0] * ranks


def devices(chance: Random, ranks: int) -> Job:
    """Return healthy GPUs that differ by 4 % (one standard deviation), twice the usual."""
    times = [1 + chance.gauss(0, 0.04) for _ in range(ranks)]
    places = chance.choice((copies(ranks), nothing))
    return lambda step, rank: times[rank], places, [0] * ranks


def nothing(rank: int) -> dict[str, tuple[int, int]]:
    return {}


def copies(ranks: int) -> Callable[[int], dict[str, tuple[int, int]]]:
    """Return the places of ranks that each have the whole model."""
    return lambda rank: {"data": (rank, ranks)}


UNEVEN: dict[str, Callable[[Random, int], Job]] = {
    "stages": stages,
    "stages, unknown": lambda chance, ranks: stages(chance, ranks, known=False),
    "one rank a stage": lambda chance, ranks: stages(chance, ranks, count=ranks),
    "experts": experts,
    "experts of two ranks and more": lambda chance, ranks: experts(chance, ranks, sets=4),
    "work": work,
    "rank 0 logs": logging,
    "GPUs": devices,
}


# --- a run ---


def raised(chance: Random, job: Job) -> Iterator[tuple[int, str, int | None]]:
    """Yield the step, kind and rank of each alarm, with all detectors and their defaults."""
    newest = [0]

    def followed() -> Iterator[Record]:
        for record in records(chance, job):
            if isinstance(record, Step):
                newest[0] = record.step
            yield record

    for anomaly in LogReplay().run(followed()):
        yield newest[0], anomaly.kind, anomaly.rank


def records(chance: Random, job: Job) -> Iterator[Record]:
    factor, places, tokens = job
    now, ranks = 1.7e9, len(tokens)
    step_s = math.exp(chance.uniform(math.log(0.1), math.log(10)))
    cv = 10 ** chance.uniform(-2.7, -1.5)
    memory, shared = chance.uniform(0, 0.7), 0.0
    mixed, wander = chance.choice((0, 0, 0.05, 0.15)), chance.choice((0, 0.005))
    pauses = chance.choice((0, 400))
    usual = [1 + chance.gauss(0, 0.01) for _ in range(ranks)]
    for rank in range(ranks):
        yield RankSeen(now, "job", rank, ranks, parallel=places(rank))
    for step in range(STEPS):
        shared = memory * shared + math.sqrt(1 - memory**2) * chance.gauss(0, 1)
        common = 0.8 * step_s * math.exp(cv * shared + mixed * chance.gauss(0, 1))
        common *= {0: 6, 1: 1.6, 2: 1.1, 3: 1.1, 4: 1.1}.get(step, 1)
        if step % 50 == 0:
            usual = [each + chance.gauss(0, wander) for each in usual]
        computes = [
            common * usual[rank] * factor(step, rank) * math.exp(chance.gauss(0, cv / 2))
            for rank in range(ranks)
        ]
        if pauses and chance.random() < 1 / pauses:
            computes[chance.randrange(ranks)] += step_s * chance.uniform(0.1, 1)
        waits = [0.005 * step_s * math.exp(chance.gauss(0, 0.5)) for _ in range(ranks)]
        duration = max(map(sum, zip(computes, waits, strict=True)))
        duration += 0.2 * step_s * math.exp(2 * cv * chance.gauss(0, 1))
        now += duration
        for rank, (compute, wait) in enumerate(zip(computes, waits, strict=True)):
            phases = {"data_wait": wait, "comm": duration - compute - wait}
            yield Step(now, "job", rank, step, duration, phases_s=phases, tokens=tokens[rank])
