"""Whole reports: what the command prints, the JSON document, and the page."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.diagnosis.captures import (
    diagnosed,
    event,
    kernel,
    loading,
    operator,
    stepped,
    without_steps,
    written,
)
from tests.diagnosis.traces import LATEST_US, RANKS, TraceFile, cpu_rank, rank_trace
from warpwatch_diagnosis.diagnosis import Diagnosis
from warpwatch_diagnosis.report.html import render_html
from warpwatch_diagnosis.report.text import render_text

DEVICE = [{"id": 1, "name": "NVIDIA L4"}, {"id": 0, "name": "NVIDIA H100 80GB HBM3"}]
NODES = {0: "gpu-1", 1: "gpu-1", 2: "gpu-2", 3: "gpu-2"}


def training(loading_us: int) -> TraceFile:
    """A bit of everything: products with shapes, copies, waits, memory, frames, collectives."""
    product = {"Input Dims": [[512, 4096], [4096, 512]], "Input type": ["c10::BFloat16"] * 2}
    memory = {"Bytes": 512, "Device Type": 1, "Device Id": 0, "Total Reserved": 1 << 31}
    at = loading_us
    return stepped(
        loading(loading_us),
        event("gpu_memcpy", "Memcpy HtoD (Pageable -> Device)", at, 400, 7, bytes=4_000_000),
        event("python_function", "train.py(12): step", at, 9000 - at),
        event("cpu_op", "aten::mm", at + 400, 100, **product),
        kernel(at + 520, 700, at + 410, "nvjet_tst_128x256_64x4"),
        kernel(at + 1220, 6, at + 420, "triton_poi_fused_add_0"),
        kernel(at + 1230, 300, at + 440, "void at::native::vectorized_elementwise_kernel<4>(int)"),
        event("cuda_runtime", "cudaMalloc", at + 1300, 200),
        operator(at + 1500, 300, "aten::item"),
        operator(at + 1510, 280, "aten::_local_scalar_dense"),
        event("cuda_runtime", "cudaStreamSynchronize", at + 1520, 260),
        event("cpu_op", "c10d::barrier", at + 2800, 1100),
        kernel(at + 1900, 800, at + 1850, "ncclDevKernel_AllReduce_Sum_f32_RING_LL"),
        *(
            event(
                "cpu_instant_event", "[memory]", at + us, 0, **memory, **{"Total Allocated": total}
            )
            for us, total in ((1950, 1 << 30), (1960, 1 << 29))
        ),
        deviceProperties=DEVICE,
        distributedInfo={"rank": 0, "world_size": 1},
    )


def slower_loading(folder: Path) -> Diagnosis:
    usual = training(500)
    usual.events.remove(next(one for one in usual.events if one["name"].startswith("triton")))
    for one in usual.events:
        one["dur"] -= 400 * one["name"].startswith("ProfilerStep")
    before = written(folder, usual, name="before")
    return diagnosed(folder, training(5000), baseline=before)


def late_rank(folder: Path) -> Diagnosis:
    ranks = [rank_trace(k, late_us=LATEST_US * (k == 2), clock_us=7777 * k) for k in range(RANKS)]
    for marked in ranks[1].events:
        marked["ts"] += 250 * marked["name"].startswith("ProfilerStep")
    return diagnosed(folder, *ranks, nodes=NODES)


def cpu_ranks(folder: Path) -> Diagnosis:
    before = written(folder, cpu_rank(0, loading_us=100), cpu_rank(1), name="before")
    ranks = (
        cpu_rank(0, host_us=500, loading_us=6000),
        cpu_rank(1, waiting_us=5000, host_us=200, steps=5),
    )
    ranks[1].event("python_function", "Python GC", 1000, 1500, 77)
    return diagnosed(folder, *ranks, baseline=before)


def no_steps(folder: Path) -> Diagnosis:
    whole = [operator(at, 490) for at in range(0, 10_000, 500)]
    return diagnosed(folder, without_steps(stepped(*whole, steps=10)))


def two_of_four(folder: Path) -> Diagnosis:
    """The longer of two ranks of four is shown, with its changes since the baseline."""
    before = written(folder, *(cpu_rank(k, world=4) for k in (1, 2)), name="before")
    ranks = (cpu_rank(k, waiting_us=7000 - 1000 * k, steps=3 + k, world=4) for k in (1, 2))
    return diagnosed(folder, *ranks, baseline=before)


FORMS: dict[str, Callable[[Diagnosis], str]] = {
    "txt": render_text,
    "json": lambda diagnosis: json.dumps(diagnosis.to_json(), indent=1),
    "html": render_html,
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("capture", [slower_loading, late_rank, cpu_ranks, two_of_four, no_steps])
def test_a_report_is_that_of_its_golden_file(tmp_path, golden, capture, form):
    text = FORMS[form](capture(tmp_path))
    golden(f"diagnosis/{capture.__name__}.{form}", text.encode())


# --- the command for the next tool: options as its documentation has them (2025.3) ----------------


def gpu(name: str, **arguments: float) -> TraceFile:
    """Five calls in each of four steps, two at once, and a collective that takes longer."""
    times = [(at, 900, "stream 7") for at in range(5000, 9000, 1000)] + [(5100, 500, "stream 8")]
    calls = [event("kernel", name, *at, **arguments) for at in times]
    return stepped(kernel(0, 5000, 0, "ncclDevKernel_AllReduce_Sum_f32_RING_LL"), *calls)


HOTTEST: dict[str, tuple[str, dict[str, float]]] = {
    "a product": (
        "void cutlass::Kernel2<cutlass_80_tensorop_s1688gemm<float, 4> >(cutlass::Params, int)",
        {},
    ),
    "a pointwise kernel": (
        "void at::native::(anonymous namespace)::vectorized_elementwise_kernel<4, at::Add>(int)",
        {"blocks per SM": 1},
    ),
    "a fused kernel": (f"triton_poi_fused_{'add_' * 10}123", {}),
    "a small grid": ("0 odd (name)", {"blocks per SM": 0.9}),
}


@pytest.mark.parametrize("name", HOTTEST)
def test_the_ncu_command_profiles_the_hottest_kernel_that_is_no_collective(
    tmp_path, name, golden_text
):
    kernel_name, arguments = HOTTEST[name]
    golden_text(diagnosed(tmp_path, gpu(kernel_name, **arguments)))
