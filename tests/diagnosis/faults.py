"""Jobs of random size with one fault of known kind in them, or none."""

from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

from tests.diagnosis.generator import Machine
from tests.diagnosis.workloads import PAGEABLE, PINNED, Fault, Job, Model

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
        gemm_us=1.35 * (layer_us - count * pointwise_us),
        pointwise_us=pointwise_us,
        pointwise_count=count,
        optimizer_us=random.uniform(0.2, 0.6) * layer_us,
        batch_bytes=random.randint(1, 4) << 18,
        buckets=random.randint(5, 8),
    )
    usual = Fault(item_each_step=random.random() < 0.3, single_process=random.random() < 0.2)
    machines = [replace(machine, speed=random.gauss(1.0, 0.008)) for _ in range(world)]
    transfer_us = random.uniform(0.2, 0.5) * 2 * layers * model.layer_us if world > 1 else 0
    sequences = random.random() < 0.5
    return Job("healthy", None, model, machines, usual, {}, transfer_us, sequences)


def _slack_us(job: Job) -> float:
    """How far a host falls behind in a step before the GPU notices."""
    return max(0.0, job.model.step_us - job.model.host_us(job.machines[0]))


def _excess_us(job: Job, random: Random, low: float = 0.25, high: float = 1.0) -> float:
    """Return time of the host that costs this share of a step in spite of its lead."""
    return _slack_us(job) + random.uniform(low, high) * job.model.step_us


def _thrash(job: Job, random: Random) -> dict[str, Any]:
    mallocs = random.randint(3, 12)
    # cudaFree drains the device, so the host has no lead: all of it is lost.
    malloc_us = random.uniform(0.15, 0.5) * job.model.step_us / (mallocs + 1)
    return {"mallocs": mallocs, "malloc_us": malloc_us}


def _collection(job: Job, random: Random) -> dict[str, Any]:
    us = 2 * _excess_us(job, random, 0.3, 1.0)
    return {"named_us": us, "named": ("python_function", "Python GC"), "every": 2}


def _checkpoint(job: Job, random: Random) -> dict[str, Any]:
    us = _excess_us(job, random, 0.5, 2.0) * 2
    names = (
        ("user_annotation", "save_checkpoint"),
        ("python_function", "torch/serialization.py(943): save"),
    )
    size = int(random.uniform(0.1, 0.5) * job.model.step_us * 6e3)
    return {"named_us": us, "named": random.choice(names), "saved_bytes": size, "every": 4}


def _compilation(job: Job, random: Random) -> dict[str, Any]:
    us = _excess_us(job, random, 1.0, 5.0) * 2
    name = "_compile.compile_inner (dynamo_timed)"
    return {"named_us": us, "named": ("cpu_op", name), "every": 2}


# The changes that a fault makes to the steps of its ranks.
FAULTS: dict[str, Callable[[Job, Random], dict[str, Any]]] = {
    "data_loading": lambda job, random: {
        "loading_us": _excess_us(job, random, 0.2, 2.0),
        "single_process": random.random() < 0.5,
    },
    "host_bound": lambda job, random: {"python_us": _excess_us(job, random, 0.3, 1.5)},
    # Without the waiting, the host would still be ahead of the GPU.
    "sync_bound": lambda job, random: {
        "item_each_layer": True,
        "metric_us": random.uniform(0.2, 0.7) * _slack_us(job) / job.model.layers,
    },
    "allocator_thrash": _thrash,
    "gc_pause": _collection,
    "checkpoint": _checkpoint,
    "recompilation": _compilation,
}
# One rank delays the others: the cause to be named, and its fault. The earliest cause in the chain
# has a name of its own.
LATE: dict[str, tuple[str, Callable[[Job, Random], dict[str, Any]]]] = {
    "straggler_clocks": ("straggler", lambda job, random: {}),
    "straggler_work": ("straggler", lambda job, random: {"more_layers": random.uniform(1.25, 1.8)}),
    "straggler_host": ("straggler", lambda job, random: {"python_us": _excess_us(job, random)}),
    "straggler_loader": (
        "data_loading", lambda job, random: {"loading_us": _excess_us(job, random)},
    ),
    "straggler_reads": ("sync_bound", FAULTS["sync_bound"]),
    "straggler_gc": ("gc_pause", _collection),
}  # fmt: skip


def _late(name: str, random: Random) -> Job:
    cause, fault = LATE[name]
    job = _healthy(random, WORLD)
    job = replace(job, usual=replace(job.usual, single_process=False))
    rank, machines = random.randrange(WORLD), list(job.machines)
    if name == "straggler_clocks":
        machines[rank] = replace(machines[rank], speed=1 / random.uniform(1.18, 1.7))
    faults = {rank: replace(job.usual, **fault(job, random))}
    return replace(job, cause=cause, rank=rank, machines=machines, faults=faults)


def _transfer_bound(random: Random) -> Job:
    job = _healthy(random)
    pageable = random.random() < 0.6
    rate = random.uniform(3.0, 7.0) if pageable else random.uniform(10.0, 22.0)
    copied_us = random.uniform(0.15, 0.8) * job.model.step_us
    model = replace(job.model, batch_bytes=int(copied_us * rate * 1e3))
    memory = PAGEABLE if pageable else PINNED
    usual = replace(job.usual, copy=memory, copy_gb_per_s=rate, blocking_copy=pageable)
    return replace(job, model=model, usual=usual)


def _launch_bound(random: Random) -> Job:
    job = _healthy(random)
    small = replace(
        job.model, gemm_us=random.uniform(4, 9), pointwise_us=random.uniform(1.5, 3.0),
        pointwise_count=random.randint(4, 8), optimizer_us=random.uniform(4, 20),
        batch_bytes=1 << 14,
    )  # fmt: skip
    return replace(job, model=small)


def _communication_bound(random: Random) -> Job:
    job = _healthy(random, random.choice((2, WORLD)))
    backward_us = 2 * job.model.layers * job.model.layer_us
    return replace(job, transfer_us=random.uniform(1.3, 3.0) * backward_us)


def _memory_bound(random: Random) -> Job:
    job = _healthy(random)
    model, share = job.model, random.uniform(0.1, 0.35)
    pointwise_us = (1 - share) * model.layer_us / model.pointwise_count
    gemm_us = share * model.layer_us
    return replace(job, model=replace(model, gemm_us=gemm_us, pointwise_us=pointwise_us))


# Faults of the whole job.
JOBS: dict[str, Callable[[Random], Job]] = {
    "healthy": lambda random: _healthy(random, random.choice((1, 1, 2, WORLD))),
    "launch_bound": _launch_bound,
    "transfer_bound": _transfer_bound,
    "communication_bound": _communication_bound,
    "memory_bound": _memory_bound,
}
NAMES = (*JOBS, *FAULTS, *LATE)


def job(name: str, seed: int) -> Job:
    random = Random(f"{name} {seed}")
    if name in LATE:
        return _late(name, random)
    if name in JOBS:
        return replace(JOBS[name](random), cause=name)
    known = _healthy(random, random.choice((1, 1, 2)) if name == "data_loading" else 1)
    return replace(known, cause=name, usual=replace(known.usual, **FAULTS[name](known, random)))
