"""The commands for the next tool: options as their documentation has them (2025.3)."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from tests.diagnosis.captures import kernel, stepped
from tests.diagnosis.traces import TraceFile
from warpwatch_diagnosis.measures.measures import Measures, measure
from warpwatch_diagnosis.report.handover import hottest
from warpwatch_diagnosis.trace.reader import read_trace

GEMM = "void cutlass::Kernel2<cutlass_80_tensorop_s1688gemm<float, 4> >(cutlass::Params, int)"
ADD = "void at::native::(anonymous namespace)::vectorized_elementwise_kernel<4, at::Add>(int)"
TRITON = "triton_poi_fused_add_0"
NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL"


def measured(folder: Path, trace: TraceFile) -> Measures:
    return measure(read_trace(trace.write(folder / "t.json")))


def gpu(name: str) -> TraceFile:
    """Four calls in each of four steps, and a collective that takes longer."""
    calls = [kernel(at, 900, 0, name) for at in range(5000, 9000, 1000)]
    return stepped(kernel(0, 5000, 0, NCCL), *calls)


@pytest.mark.parametrize(
    ("name", "function", "sections"),
    [
        (GEMM, "Kernel2", ("ComputeWorkloadAnalysis", "WarpStateStats")),
        (ADD, "vectorized_elementwise_kernel", ("MemoryWorkloadAnalysis", "SourceCounters")),
        (TRITON, TRITON, ("ComputeWorkloadAnalysis", "WarpStateStats")),
    ],
)
def test_the_ncu_command_profiles_the_hottest_kernel_that_is_no_collective(
    tmp_path: Path, name: str, function: str, sections: tuple[str, ...]
) -> None:
    found = hottest(measured(tmp_path, gpu(name)))
    assert found is not None
    assert found.kernel == name
    # Replaying a collective can hang.
    assert shlex.split(found.ncu) == [
        "ncu", "--target-processes=all", "--kernel-name-base=function",
        f"--kernel-name=regex:^{function}$", "--launch-skip=4", "--launch-count=3",
        *(f"--section={section}" for section in ("SpeedOfLight", *sections)),
        "--export=warpwatch", "python", "-u", "train.py",
    ]  # fmt: skip
