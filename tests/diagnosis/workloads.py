"""A training loop for the generator, and jobs of random size with one known fault or none."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

from tests.diagnosis.generator import Machine, Program, Rank, run

LOADER = "enumerate(DataLoader)#_{}DataLoaderIter.__next__"
GEMM = "ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_32x5_tn"
POINTWISE = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::gelu_kernel>(int)",
    "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float>(int)",
    "void at::native::elementwise_kernel<128, 4, at::native::mul_kernel>(int)",
)
OPTIMIZER = "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedAdam>(int)"
PINNED, PAGEABLE = "Memcpy HtoD (Pinned -> Device)", "Memcpy HtoD (Pageable -> Device)"
SKIPPED_STEPS, RECORDED_STEPS = 3, 5


@dataclass(frozen=True)
class Model:
    """Per layer one product and some pointwise kernels, in µs; backward takes twice as much."""

    layers: int
    gemm_us: float
    pointwise_us: float
    pointwise_count: int
    optimizer_us: float
    batch_bytes: int
    buckets: int

    @property
    def layer_us(self) -> float:
        return self.gemm_us + self.pointwise_count * self.pointwise_us

    @property
    def step_us(self) -> float:
        """The GPU's time, without communication."""
        return 3 * self.layers * self.layer_us + 3 * self.optimizer_us

    def host_us(self, machine: Machine) -> float:
        """Return the time that the host needs to launch a step."""
        operator_us = machine.python_us + machine.dispatch_us + machine.launch_us + 1.5
        kernels = self.layers * 3 * (1 + self.pointwise_count)
        return kernels * operator_us + 3 * machine.launch_us + self.buckets * 14.0


@dataclass(frozen=True)
class Fault:
    """The faults in a step of the ranks that have them; 0 and empty without. Times in
    µs of a step. metric_us: Python with each value that is read. every: n-th step has it."""

    loading_us: float = 0.0
    single_process: bool = False
    python_us: float = 0.0
    item_each_layer: bool = False
    metric_us: float = 0.0
    item_each_step: bool = False
    copy: str = PINNED
    copy_gb_per_s: float = 22.0
    blocking_copy: bool = False
    mallocs: int = 0
    malloc_us: float = 0.0
    named_us: float = 0.0
    named: tuple[str, str] = ("", "")
    saved_bytes: int = 0
    more_layers: float = 1.0
    every: int = 1


@dataclass(frozen=True)
class Job:
    """cause, rank: the expected diagnosis. faults: by rank; the others have ``usual``."""

    cause: str
    rank: int | None
    model: Model
    machines: list[Machine]
    usual: Fault
    faults: dict[int, Fault] = field(default_factory=dict)
    transfer_us: float = 0.0
    sequences: bool = True

    def fault_of(self, rank: int) -> Fault:
        return self.faults.get(rank, self.usual)


def train(job: Job, rank: Rank) -> Program:
    fault = job.fault_of(rank.rank)
    for step in range(SKIPPED_STEPS + RECORDED_STEPS):
        if step == SKIPPED_STEPS:
            rank.synchronize()
            rank.recording = True
        with rank.span("user_annotation", f"ProfilerStep#{step}"):
            yield from _step(job, rank, fault, step)
    rank.synchronize()


def _step(job: Job, rank: Rank, fault: Fault, step: int) -> Program:
    model = job.model
    layers = round(model.layers * fault.more_layers)
    hit = step % fault.every == 0
    kind = "SingleProcess" if fault.single_process else "MultiProcessing"
    with rank.span("user_annotation", LOADER.format(kind)):
        rank.spend(60.0 + (fault.loading_us if hit else 0.0))
    with rank.span("cpu_op", "aten::to"), rank.span("cpu_op", "aten::copy_"):
        rank.spend(rank.machine.dispatch_us)
        rank.copy(fault.copy, model.batch_bytes, fault.copy_gb_per_s, fault.blocking_copy)
    if hit and fault.named_us:
        _named(rank, fault)
    for _ in range(fault.mallocs):
        rank.malloc(fault.malloc_us)
    for layer in range(layers):
        _layer(rank, model, "forward", 1.0)
        _between(rank, fault, hit, layers, layer)
    rank.thread = 101
    yield from _backward(job, rank, layers, step)
    rank.thread = 100
    if fault.mallocs:
        rank.free(fault.malloc_us)
    rank.wait_for_communication()
    with rank.span("user_annotation", "Optimizer.step#AdamW.step"):
        rank.operator("aten::_fused_adamw_", *[(OPTIMIZER, model.optimizer_us)] * 3)
    if fault.item_each_step:
        rank.item()


def _layer(rank: Rank, model: Model, direction: str, factor: float) -> None:
    backward = direction == "backward"
    rank.operator("MmBackward0" if backward else "aten::linear", (GEMM, factor * model.gemm_us))
    for index in range(model.pointwise_count):
        name = POINTWISE[index % len(POINTWISE)]
        rank.operator("aten::mul", (name, factor * model.pointwise_us))


def _between(rank: Rank, fault: Fault, hit: bool, layers: int, layer: int) -> None:
    if hit and fault.python_us:
        rank.spend(fault.python_us / layers)
    if fault.item_each_layer:
        rank.item()
        rank.spend(fault.metric_us)


def _named(rank: Rank, fault: Fault) -> None:
    """Add an activity that has a name in the trace: a collection, a compilation, a checkpoint."""
    with rank.span(fault.named[0], fault.named[1]):
        if fault.saved_bytes:
            rank.copy("Memcpy DtoH (Device -> Pageable)", fault.saved_bytes, 6.0, blocking=True)
        rank.spend(fault.named_us)


def _backward(job: Job, rank: Rank, layers: int, step: int) -> Program:
    """Gradients go out bucket by bucket while the rest is computed."""
    model, sent = job.model, 0
    for layer in range(layers):
        _layer(rank, model, "backward", 2.0)
        while len(job.machines) > 1 and sent < round(model.buckets * (layer + 1) / layers):
            sequence = step * model.buckets + sent if job.sequences else None
            yield from rank.all_reduce(25 << 20, job.transfer_us / model.buckets, sequence)
            sent += 1


def simulate(job: Job, folder: Path, seed: int) -> list[Path]:
    world = len(job.machines)
    random = Random(seed)
    ranks = [Rank(k, world, job.machines[k], Random(seed * 1000 + k)) for k in range(world)]
    run(ranks, lambda rank: train(job, rank))
    spread_us = random.choice((0.0, 3e3, 2e6))
    return [rank.write(folder, random.uniform(-spread_us, spread_us)) for rank in ranks]


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
