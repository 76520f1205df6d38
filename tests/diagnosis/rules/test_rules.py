"""Each rule on traces with a known cause, and one finding for one fault."""

import re
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from tests.cases import cases
from tests.diagnosis.captures import Part, diagnosed, event, kernel, loading, operator, stepped
from tests.diagnosis.traces import ORIGIN_US, STEP_US, TraceFile, cpu_rank, rank_trace
from warpwatch_diagnosis import rules
from warpwatch_diagnosis.diagnosis import Diagnosis
from warpwatch_diagnosis.report.text import render_text

WORKERS = "MultiProcessing"
COMPILING = "entire_frame_compile (dynamo_timed)"
OPTIMIZER = "user_annotation", "Optimizer.step#Adam.step", 0
CHECKPOINT = "user_annotation", "save_checkpoint", 0
BARRIER = "user_annotation", "gloo:barrier", 0
COLLECTOR = "python_function", "Python GC"
COPY = "Memcpy HtoD (Pageable -> Device)"


def test_the_registry_lists_every_rule_in_order():
    texts = (path.read_text() for path in Path(rules.__file__).parent.glob("*.py"))
    kinds = [kind for text in texts for kind in re.findall(r'^    kind = "(\w+)"$', text, re.M)]
    assert [rule.kind for rule in rules.RULES] == sorted(kinds)


def kernels(count: int, us: float, launch_us: float = 5, late: bool = True) -> list[Part]:
    starts = [k * (STEP_US / count) for k in range(count)]
    return [
        kernel(at, us, at - launch_us - 1 if late else -50, launch_us=launch_us) for at in starts
    ]


def waits(wait_us: float, restart_us: float) -> list[Part]:
    """The host reads a value five times: the device is idle until the next launch."""
    parts = []
    for at in range(0, STEP_US, STEP_US // 5):
        until = at + 2000 - restart_us
        parts += [
            kernel(at, 2000 - restart_us, at - 10),
            event("cpu_op", "aten::item", until - wait_us, wait_us + 1),
            event("cuda_runtime", "cudaStreamSynchronize", until - wait_us, wait_us),
        ]
    return parts


def classes(moving_us: float) -> list[Part]:
    """A busy device: products, and pointwise kernels for ``moving_us``."""
    return [
        kernel(0, STEP_US - moving_us, -50, "sm80_xmma_gemm"),
        kernel(STEP_US - moving_us, moving_us, -40, "vectorized_elementwise_kernel"),
    ]


def reads(count: int, pace_us: int) -> list[Part]:
    return [
        part
        for at in range(0, count * pace_us, pace_us)
        for part in (
            operator(at, 2, "aten::item"),
            operator(at + 0.5, 1, "aten::_local_scalar_dense"),
        )
    ]


def compiled(frames: int, between_us: float, regions: int = 20) -> list[Part]:
    """Regions of that many functions, with Python between them."""
    size, parts = STEP_US // regions, []
    for k in range(regions):
        parts += [
            operator(k * size, size, f"Torch-Compiled Region: {k % frames}/0"),
            operator(k * size, between_us, "TorchDynamo Cache Lookup"),
            operator(k * size + between_us, size - between_us),
        ]
    return parts


def filled(free_us: float, *parts: Part) -> list[Part]:
    """Parts in a step whose operators leave its first ``free_us`` free."""
    return [*parts, operator(free_us, STEP_US - free_us)]


def gpu(*parts: Part, free_us: float) -> list[Part]:
    """Parts in a step whose first ``free_us`` the device is free."""
    return [*parts, kernel(free_us, STEP_US - free_us, free_us - 5)]


def copied(us: float, gb_per_s: float, memory: str = "Pageable") -> list[Part]:
    size = int(us * gb_per_s * 1000)
    name = f"Memcpy HtoD ({memory} -> Device)"
    copy = event("gpu_memcpy", name, STEP_US - us, us, 7, bytes=size)
    return [kernel(0, STEP_US - us, -50), copy]


# By kind of the only finding where most is lost: the lost µs of each step -> its parts.
FAULTS: dict[str, dict[str, Callable[[float], list[Part]]]] = {
    "data_loading": {
        "idle time under the loader": lambda us: gpu(
            loading(us), kernel(0, us / 4, -5), free_us=us + 60
        ),
        "waiting for workers": lambda us: filled(
            us, loading(us, kind=WORKERS), loading(9, tid=9), event(*BARRIER, 50, tid=99)
        ),
        "loading by the process itself":
            lambda us: filled(us, loading(us), *reads(int(us / 10), 10)),
        # The training thread waits for what a thread of the loader does.
        "a prefetcher's loading that the training waits for":
            lambda us: [loading(us, tid=99), operator(us, STEP_US - us)],
    },
    "host_bound": {
        "a prefetcher's loading that nothing waits for":
            lambda us: [loading(us, at=STEP_US - us, tid=99), operator(us, STEP_US - us)],
        "late launches of long kernels": lambda us: kernels(50, 200 - us / 50),
        "an optimizer that reads its step counters":
            lambda us: filled(us, *reads(int(us / 10), 10), event(*OPTIMIZER, us)),
        "layers that are compiled one by one": lambda us: compiled(frames=1, between_us=us / 20),
        "tiny operators": lambda us: [
            *(operator(5 * k, 4, "aten::add") for k in range(int(us / 5))),
            operator(us, STEP_US - us),
        ],
        "Python between operators": lambda us: filled(us),
    },
    "launch_bound": {
        "late launches of short kernels": lambda us: kernels(500, 20 - us / 500, launch_us=12),
    },
    "communication_bound": {
        "collectives that run alone": lambda us: [
            kernel(0, STEP_US - us, -50),
            kernel(STEP_US - 1.3 * us, 1.3 * us, -50, "ncclDevKernel_AllReduce"),
        ],
    },
    "transfer_bound": {
        "copies of pageable memory": lambda us: copied(us, 4.0),
        "copies of pinned memory": lambda us: [
            *copied(us, 20.0, "Pinned"),
            event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 0, 90, 21, bytes=900_000),
        ],
        "copies that get faster": lambda us: copied(0.3 * STEP_US, 25 * us / STEP_US, "Pinned"),
        # Its own event is not in the trace, nor that it is pageable.
        "copies that keep the host while the GPU is idle": lambda us: [
            operator(0, us + 100, "aten::copy_"),
            event("cuda_runtime", "cudaMemcpyAsync", 10, us),
            kernel(us + 200, STEP_US - us - 200, us + 150),
        ],
    },
    "sync_bound": {
        "reading values of the GPU": lambda us: waits(1500, us / 6),
        "a loop that reads values": lambda us: filled(us, *reads(int(us / 10), 10)),
    },
    "memory_bound": {"a busy device that moves memory": classes},
    "allocator_thrash": {
        "memory from the driver":
            lambda us: gpu(event("cuda_runtime", "cudaMalloc", 10, us), free_us=us + 20),
    },
    "checkpoint": {
        "gaps after state_dict":
            lambda us: filled(us, *(operator(5 * k, 5, "aten::detach") for k in range(10))),
        "a checkpoint with a name": lambda us: filled(us, event(*CHECKPOINT, us)),
        "a checkpoint while the GPU is idle":
            lambda us: gpu(event(*CHECKPOINT, us), free_us=us + 50),
    },
    "gc_pause": {
        "the collector": lambda us: filled(us, event(*COLLECTOR, 0, us)),
        "the collector while the GPU is idle": lambda us: gpu(
            event("python_function", "<built-in function collect>", 0, us), free_us=us
        ),
        "a collection while the loader runs":
            lambda us: filled(us, loading(us), event(*COLLECTOR, us / 8, us * 7 / 8)),
    },
    "recompilation": {
        "compiling in every step": lambda us: filled(us, operator(0, us, COMPILING)),
        "Python between pieces of compiled code":
            lambda us: [*compiled(frames=4, between_us=us / 20), *reads(int(us / 10), 10)],
    },
}  # fmt: skip
KINDS = {name: kind for kind, faults in FAULTS.items() for name in faults}
LOST = (
    0.01, 0.02, 0.03, 0.04, 0.06, 0.08, 0.11, 0.13, 0.16, 0.19, 0.22, 0.27, 0.32, 0.38, 0.55, 0.75,
)  # fmt: skip


RANKS: dict[str, dict[str, Any]] = cases(__file__)["ranks"]


def ranks_of(fault: dict[str, Any], us: int) -> list[TraceFile]:
    make: Callable[..., TraceFile] = cpu_rank if "cpu" in fault else rank_trace
    ranks = []
    for rank, shares in enumerate(fault.get("cpu") or fault["gpu"]):
        lost = {name: int(us * Fraction(share)) for name, share in shares.items()}
        ranks.append(make(rank, **lost, **fault.get("all", {})))
    return ranks


def findings(found: Diagnosis) -> str:
    """Return a line about the verdict and those of each finding."""
    return "".join(
        [f"{found.verdict}: {found.summary}\n"]
        + [
            f"    {f.kind} {f.rank} {f.share:.3f} {f.confidence} saves {f.recoverable_s:.4f} s\n"
            + "".join(f"      {one}\n" for one in f.evidence)
            for f in found.findings
        ]
    )


@pytest.mark.parametrize("fault", [*KINDS, *RANKS])
def test_a_fault_is_found_from_its_limit_on_and_alone_where_it_is_large(
    tmp_path, fault, golden_case
):
    text = ""
    for lost in LOST:
        if fault in KINDS:
            kind, rank = KINDS[fault], 0
            parts = FAULTS[kind][fault](lost * STEP_US)
            found = diagnosed(tmp_path, stepped(*parts, steps=3))
        else:
            kind, rank = RANKS[fault]["verdict"], RANKS[fault]["rank"]
            found = diagnosed(tmp_path, *ranks_of(RANKS[fault], round(lost * STEP_US)))
        text += f"{lost:.2f} {findings(found)}"
    assert [(f.kind, f.rank) for f in found.findings] == [(kind, rank)]
    assert found.verdict == kind
    golden_case(text + render_text(found))


# Most trainings copy a few bytes, and read a value, in each step.
SMALL_COPY = event("gpu_memcpy", "Memcpy DtoH (Device -> Pageable)", 5, 1.5, 7, bytes=4)
HIDDEN_COPY = event("gpu_memcpy", COPY, 0, 6900, 21, bytes=4_000_000)
SMALL_READ = [
    event("cuda_runtime", "cudaMemcpyAsync", 9990, 1, correlation=10**6),
    event("gpu_memcpy", "Memcpy DtoH (Device -> Pageable)", 9991, 1, 7, bytes=4, correlation=10**6),
    event("cuda_runtime", "cudaStreamSynchronize", 9991, 2),
]
SYNCHRONIZED = [
    part
    for at in (0, STEP_US // 2)
    for part in (
        kernel(at, 4000, at - 10),
        event("cuda_runtime", "cudaDeviceSynchronize", at + 20, 3980),
    )
]


AMD: dict[str, Any] = {"deviceProperties": [{"id": 0, "name": "AMD Instinct MI300X"}]}


@pytest.mark.parametrize(
    ("parts", "small", "head", "advised"),
    [
        (copied(3000, 20.0, "Pinned"), [SMALL_COPY, HIDDEN_COPY], {}, "on a stream of its own"),
        (copied(3000, 2.0, "Pinned"), [SMALL_COPY], AMD, "(amd-smi metric --pcie: PCIe generation"),
        (SYNCHRONIZED, SMALL_READ, {}, "torch.cuda.synchronize()"),
    ],
    ids=["transfer_bound", "transfer_bound on AMD", "sync_bound"],
)
def test_advice_is_about_what_takes_long_not_about_what_else_there_is(
    tmp_path, parts, small, head, advised
):
    alone, beside = (
        diagnosed(tmp_path, stepped(*some, **head)).findings[0]
        for some in (parts, [*parts, *small])
    )
    assert advised in alone.advice
    assert beside.advice == alone.advice


HEALTHY: dict[str, list[Part]] = {
    "a busy GPU": kernels(50, 200),
    "loading that the GPU does not wait for": [loading(4000), *kernels(50, 200)],
    "copies that compute hides": [event("gpu_memcpy", COPY, 0, 5000, 21), *kernels(50, 200)],
    "long waits for a busy device": waits(wait_us=1500, restart_us=20),
    "a few compiled regions": compiled(frames=4, between_us=200, regions=4),
    "a few values a step": filled(1000, *reads(9, 100)),
}


@pytest.mark.parametrize("parts", HEALTHY.values(), ids=HEALTHY)
def test_what_does_not_delay_the_step_is_healthy(tmp_path, parts, golden_text):
    found = diagnosed(tmp_path, stepped(*parts))
    golden_text(found)
    assert (found.verdict, found.findings) == ("healthy", ())


def test_a_collection_that_the_capture_noted_is_a_gc_pause(tmp_path):
    base_us = 5_000_000
    noted = [[ORIGIN_US + base_us + 100, 300], [ORIGIN_US + base_us - 9_000_000, 1], ["x"], None]
    noted.append([ORIGIN_US + base_us + 4 * STEP_US - 10, 900])
    head: dict[str, Any] = {"gc_pauses_us": noted}
    trace = stepped(*filled(500), warpwatch=head, baseTimeNanoseconds=base_us * 1000)
    trace.operator(0, 50)
    found = diagnosed(tmp_path, trace)
    assert (found.measures[0].host.gc.total_us, found.verdict) == (300, "healthy")
    noted.append([ORIGIN_US + base_us + STEP_US, 450])
    assert diagnosed(tmp_path, trace).verdict == "gc_pause"
