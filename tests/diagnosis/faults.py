"""Jobs of random size with one fault of known kind in them, or none.

``python -m tests.diagnosis.faults [seeds] [names]`` measures how often the diagnosis is right.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

from tests.diagnosis.generator import Machine
from tests.diagnosis.workloads import PAGEABLE, PINNED, Fault, Job, Model, simulate
from warpwatch_diagnosis.diagnosis import diagnose

WORLD = 8


def _machine(random: Random) -> Machine:
    return Machine(
        launch_us=random.uniform(3.5, 7.0),
        dispatch_us=random.uniform(6.0, 14.0),
        python_us=random.uniform(3.0, 10.0),
        kernel_noise=random.uniform(0.01, 0.05),
        host_noise=random.uniform(0.05, 0.25),
    )


def _healthy(random: Random, world: int = 1) -> Job:
    """Limited by the GPU's arithmetic: the host needs a fifth to two thirds of the GPU's time."""
    machine = _machine(random)
    count = random.randint(2, 4)
    operator_us = machine.python_us + machine.dispatch_us + machine.launch_us + 1.5
    layer_us = (1 + count) * operator_us / random.uniform(0.2, 0.65) / 2
    pointwise_us = random.uniform(0.15, 0.35) * layer_us / count
    layers = random.randint(8, 20)
    model = Model(
        layers=layers,
        gemm_us=layer_us - count * pointwise_us,
        pointwise_us=pointwise_us,
        pointwise_count=count,
        optimizer_us=random.uniform(0.2, 0.6) * layer_us,
        batch_bytes=random.randint(1, 4) << 18,
        buckets=random.randint(5, 8),
    )
    model = replace(model, gemm_us=model.gemm_us * 1.35)
    usual = Fault(item_each_step=random.random() < 0.3, single_process=random.random() < 0.2)
    machines = [replace(machine, speed=random.gauss(1.0, 0.008)) for _ in range(world)]
    transfer_us = random.uniform(0.2, 0.5) * 2 * model.layers * model.layer_us if world > 1 else 0
    sequences = random.random() < 0.5
    return Job("healthy", None, model, machines, usual, {}, transfer_us, sequences)


def _slack_us(job: Job) -> float:
    """How far a host falls behind in a step before the GPU notices."""
    return max(0.0, job.model.step_us - job.model.host_us(job.machines[0]))


def _excess_us(job: Job, random: Random, low: float = 0.25, high: float = 1.0) -> float:
    """Time of the host that costs this share of a step, whatever lead it has."""
    return _slack_us(job) + random.uniform(low, high) * job.model.step_us


def _with(job: Job, cause: str, **fault: Any) -> Job:
    return replace(job, cause=cause, usual=replace(job.usual, **fault))


def _data_loading(random: Random) -> Job:
    job = _healthy(random, random.choice((1, 1, 2)))
    loading_us = _excess_us(job, random, 0.2, 2.0)
    single = random.random() < 0.5
    return _with(job, "data_loading", loading_us=loading_us, single_process=single)


def _host_bound(random: Random) -> Job:
    job = _healthy(random)
    return _with(job, "host_bound", python_us=_excess_us(job, random, 0.3, 1.5))


def _launch_bound(random: Random) -> Job:
    job = _healthy(random)
    small = replace(
        job.model, gemm_us=random.uniform(4, 9), pointwise_us=random.uniform(1.5, 3.0),
        pointwise_count=random.randint(4, 8), optimizer_us=random.uniform(4, 20),
        batch_bytes=1 << 14,
    )  # fmt: skip
    return replace(job, cause="launch_bound", model=small)


def _sync_bound(random: Random) -> Job:
    job = _healthy(random)
    # Without the waiting, the host would still be ahead of the GPU.
    metric_us = random.uniform(0.2, 0.7) * _slack_us(job) / job.model.layers
    return _with(job, "sync_bound", item_each_layer=True, metric_us=metric_us)


def _transfer_bound(random: Random) -> Job:
    job = _healthy(random)
    pageable = random.random() < 0.6
    rate = random.uniform(3.0, 7.0) if pageable else random.uniform(10.0, 22.0)
    copied_us = random.uniform(0.15, 0.8) * job.model.step_us
    job = replace(job, model=replace(job.model, batch_bytes=int(copied_us * rate * 1e3)))
    return _with(
        job, "transfer_bound", copy=PAGEABLE if pageable else PINNED, copy_gb_per_s=rate,
        blocking_copy=pageable,
    )  # fmt: skip


def _communication_bound(random: Random) -> Job:
    job = _healthy(random, random.choice((2, WORLD)))
    backward_us = 2 * job.model.layers * job.model.layer_us
    return replace(
        job, cause="communication_bound", transfer_us=random.uniform(1.3, 3.0) * backward_us
    )


def _memory_bound(random: Random) -> Job:
    job = _healthy(random)
    model = job.model
    share = random.uniform(0.1, 0.35)
    pointwise_us = (1 - share) * model.layer_us / model.pointwise_count
    changed = replace(model, gemm_us=share * model.layer_us, pointwise_us=pointwise_us)
    return replace(job, cause="memory_bound", model=changed)


def _allocator_thrash(random: Random) -> Job:
    job = _healthy(random)
    mallocs = random.randint(3, 12)
    # cudaFree drains the device, so the host has no lead: all of it is lost.
    malloc_us = random.uniform(0.15, 0.5) * job.model.step_us / (mallocs + 1)
    return _with(job, "allocator_thrash", mallocs=mallocs, malloc_us=malloc_us)


def _gc_pause(random: Random) -> Job:
    job = _healthy(random)
    us = _excess_us(job, random, 0.3, 1.0) * 2
    return _with(job, "gc_pause", named_us=us, named=("python_function", "Python GC"), every=2)


def _checkpoint(random: Random) -> Job:
    job = _healthy(random)
    us = _excess_us(job, random, 0.5, 2.0) * 2
    name = random.choice(
        (("user_annotation", "save_checkpoint"),
         ("python_function", "torch/serialization.py(943): save"))
    )  # fmt: skip
    size = int(random.uniform(0.1, 0.5) * job.model.step_us * 6e3)
    return _with(job, "checkpoint", named_us=us, named=name, saved_bytes=size, every=4)


def _recompilation(random: Random) -> Job:
    job = _healthy(random)
    us = _excess_us(job, random, 1.0, 5.0) * 2
    name = ("cpu_op", "_compile.compile_inner (dynamo_timed)")
    return _with(job, "recompilation", named_us=us, named=name, every=2)


def _late(random: Random, **fault: Any) -> Job:
    job = _healthy(random, WORLD)
    job = replace(job, usual=replace(job.usual, single_process=False))
    rank = random.randrange(WORLD)
    return replace(job, cause="straggler", rank=rank, faults={rank: replace(job.usual, **fault)})


def _slow_clocks(random: Random) -> Job:
    job = _late(random)
    assert job.rank is not None
    machines = list(job.machines)
    machines[job.rank] = replace(machines[job.rank], speed=1 / random.uniform(1.18, 1.7))
    return replace(job, machines=machines)


def _more_work(random: Random) -> Job:
    return _late(random, more_layers=random.uniform(1.25, 1.8))


def _slow_host(random: Random) -> Job:
    job = _late(random)
    assert job.rank is not None
    fault = replace(job.usual, python_us=_excess_us(job, random, 0.2, 1.0))
    return replace(job, faults={job.rank: fault})


def _slow_loader(random: Random) -> Job:
    """The earliest cause in the chain has a name of its own; the rank is what matters."""
    job = _late(random)
    assert job.rank is not None
    fault = replace(job.usual, loading_us=_excess_us(job, random, 0.2, 1.0))
    return replace(job, cause="data_loading", faults={job.rank: fault})


def _reading_rank(random: Random) -> Job:
    job = _late(random)
    assert job.rank is not None
    metric_us = 0.6 * _slack_us(job) / job.model.layers
    fault = replace(job.usual, item_each_layer=True, metric_us=metric_us)
    return replace(job, cause="sync_bound", faults={job.rank: fault})


def _collecting_rank(random: Random) -> Job:
    job = _late(random)
    assert job.rank is not None
    us = 2 * _excess_us(job, random, 0.3, 1.0)
    fault = replace(job.usual, named_us=us, named=("python_function", "Python GC"), every=2)
    return replace(job, cause="gc_pause", faults={job.rank: fault})


def _healthy_of_any_size(random: Random) -> Job:
    return _healthy(random, random.choice((1, 1, 2, WORLD)))


JOBS: dict[str, Callable[[Random], Job]] = {
    "healthy": _healthy_of_any_size,
    "data_loading": _data_loading,
    "host_bound": _host_bound,
    "launch_bound": _launch_bound,
    "sync_bound": _sync_bound,
    "transfer_bound": _transfer_bound,
    "communication_bound": _communication_bound,
    "memory_bound": _memory_bound,
    "allocator_thrash": _allocator_thrash,
    "gc_pause": _gc_pause,
    "checkpoint": _checkpoint,
    "recompilation": _recompilation,
    "straggler_clocks": _slow_clocks,
    "straggler_work": _more_work,
    "straggler_host": _slow_host,
    "straggler_loader": _slow_loader,
    "straggler_reads": _reading_rank,
    "straggler_gc": _collecting_rank,
}


def job(name: str, seed: int) -> Job:
    return JOBS[name](Random(f"{name} {seed}"))


def main(seeds: int, names: list[str]) -> None:
    for name in names or list(JOBS):
        said: Counter[str] = Counter()
        for seed in range(seeds):
            known = job(name, seed)
            with tempfile.TemporaryDirectory() as folder:
                found = diagnose(simulate(known, Path(folder), seed))
            rank = found.findings[0].rank if found.findings and known.rank is not None else None
            right = (found.verdict, rank) == (known.cause, known.rank)
            said["right" if right else f"{found.verdict} {rank} (seed {seed})"] += 1
        sys.stdout.write(f"{name:22}{said['right']:4} of {seeds}  {dict(said)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 20, sys.argv[2:])
