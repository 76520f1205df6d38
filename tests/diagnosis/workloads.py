"""A training loop for the generator: a model, and what goes wrong in a step."""

from dataclasses import dataclass, field
from pathlib import Path
from random import Random

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
    _allocate(rank, fault)
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


def _allocate(rank: Rank, fault: Fault) -> None:
    for _ in range(fault.mallocs):
        rank.malloc(fault.malloc_us)


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
