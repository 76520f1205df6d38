"""The commands for the next tool have only options that it documents."""

from __future__ import annotations

import argparse
import re
import shlex
from pathlib import Path

import pytest

from tests.diagnosis.traces import TraceFile
from warpwatch_diagnosis.measures.measures import Measures, measure
from warpwatch_diagnosis.report.handover import hottest, lines, nsys, perfetto
from warpwatch_diagnosis.trace.reader import read_trace

GEMM = "void cutlass::Kernel2<cutlass_80_tensorop_s1688gemm<float, 4> >(cutlass::Params, int)"
ADD = "void at::native::(anonymous namespace)::vectorized_elementwise_kernel<4, at::Add>(int)"
TRITON = "triton_poi_fused_add_0"
NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL"
# Sections of Nsight Compute 2025.3 (`ncu --list-sections`).
SECTIONS = (
    "ComputeWorkloadAnalysis", "InstructionStats", "LaunchStats", "MemoryWorkloadAnalysis",
    "MemoryWorkloadAnalysis_Chart", "MemoryWorkloadAnalysis_Tables", "NumaAffinity", "Nvlink",
    "Occupancy", "PmSampling", "SchedulerStats", "SourceCounters", "SpeedOfLight",
    "SpeedOfLight_RooflineChart", "WarpStateStats", "WorkloadDistribution",
)  # fmt: skip


def ncu_parser() -> argparse.ArgumentParser:
    """What "Nsight Compute CLI" documents of the options that are used."""
    parser = argparse.ArgumentParser(exit_on_error=False, allow_abbrev=False)
    parser.add_argument("--target-processes", choices=["application-only", "all"])
    parser.add_argument("--kernel-name-base", choices=["function", "demangled", "mangled"])
    parser.add_argument("--kernel-name", type=re.compile("regex:.+|[^:]+").fullmatch)
    parser.add_argument("--launch-skip", type=int)
    parser.add_argument("--launch-count", type=int)
    parser.add_argument("--section", action="append", choices=SECTIONS)
    parser.add_argument("--export")
    parser.add_argument("program", nargs=argparse.REMAINDER)
    return parser


def nsys_parser() -> argparse.ArgumentParser:
    """As ncu_parser, of ``nsys profile`` ("User Guide", CLI profile command switch options)."""
    parser = argparse.ArgumentParser(exit_on_error=False, allow_abbrev=False)
    traces = "cuda|nvtx|osrt|cublas|cudnn|mpi|python-gil|ucx|none"
    parser.add_argument("--trace", type=re.compile(rf"({traces})(,({traces}))*").fullmatch)
    parser.add_argument("--capture-range", choices=["none", "cudaProfilerApi", "hotkey", "nvtx"])
    ends = r"none|stop|stop-shutdown|repeat(:\d+)?|repeat-shutdown:\d+"
    parser.add_argument("--capture-range-end", type=re.compile(ends).fullmatch)
    pytorch = ["autograd-nvtx", "autograd-shapes-nvtx", "functions-trace", "none"]
    parser.add_argument("--pytorch", choices=pytorch)
    parser.add_argument("--python-sampling", choices=["true", "false"])
    parser.add_argument("--python-backtrace", choices=["cuda", "none", "false"])
    parser.add_argument("--cuda-graph-trace", choices=["graph", "node"])
    parser.add_argument("--sample", choices=["process-tree", "system-wide", "none"])
    parser.add_argument("--output")
    parser.add_argument("program", nargs=argparse.REMAINDER)
    return parser


def measured(folder: Path, name: str) -> Measures:
    trace = TraceFile()
    for begin in trace.each_step():
        trace.kernel(begin, 5000, begin, name=NCCL)
        for at in range(begin + 5000, begin + 9000, 1000):
            trace.kernel(at, 900, begin, name=name)
    return measure(read_trace(trace.write(folder / "t.json")))


@pytest.mark.parametrize(
    ("name", "function", "section"),
    [
        (GEMM, "Kernel2", "ComputeWorkloadAnalysis"),
        (ADD, "vectorized_elementwise_kernel", "MemoryWorkloadAnalysis"),
        (TRITON, TRITON, "ComputeWorkloadAnalysis"),
    ],
)
def test_the_ncu_command_has_documented_options_and_finds_the_kernel(
    tmp_path: Path, name: str, function: str, section: str
) -> None:
    found = hottest(measured(tmp_path, name))
    assert found is not None
    tool, *options = shlex.split(found.ncu)
    parsed = ncu_parser().parse_args(options)
    assert tool == "ncu"
    assert parsed.program == ["python", "-u", "train.py"]
    # No collective, though it takes longer: replaying one can hang.
    pattern = parsed.kernel_name[0].removeprefix("regex:")
    assert re.search(pattern, function)
    assert not re.search(pattern, f"other_{function}")
    assert (parsed.launch_skip, parsed.launch_count) == (4, 3)
    assert section in parsed.section


def test_the_nsys_command_has_documented_options(tmp_path: Path) -> None:
    command = nsys(measured(tmp_path, GEMM))
    assert command is not None
    tool, action, *options = shlex.split(command)
    assert (tool, action) == ("nsys", "profile")
    assert nsys_parser().parse_args(options).program == ["python", "-u", "train.py"]


def test_the_perfetto_link_shows_the_longest_step(tmp_path: Path) -> None:
    found = measured(tmp_path, GEMM)
    match = re.fullmatch(
        r"https://ui\.perfetto\.dev/#!/\?visStart=(\d+)&visEnd=(\d+)", perfetto(found) or ""
    )
    assert match is not None
    begin_us, end_us = found.steps[0]
    assert int(match[1]) == pytest.approx(begin_us * 1e3, abs=1e3)
    assert int(match[2]) - int(match[1]) == pytest.approx((end_us - begin_us) * 1e3, rel=0.01)


def test_without_a_gpu_there_is_only_the_link(tmp_path: Path) -> None:
    trace = TraceFile()
    trace.operator(0, 9000)
    found = measure(read_trace(trace.write(tmp_path / "t.json")))
    assert [title.partition(",")[0] for title, _ in lines(found)] == ["Perfetto"]
