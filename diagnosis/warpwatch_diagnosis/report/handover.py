"""Provides the next commands: Nsight Compute for the hottest kernel, Nsight Systems, Perfetto.

Options as in the documentation of the Nsight Compute CLI and of Nsight Systems 2025.3, links as in
Perfetto's page on deep links.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

from warpwatch_diagnosis.measures.gpu_work import KernelTime
from warpwatch_diagnosis.measures.measures import Measures
from warpwatch_diagnosis.measures.roofline import MEMORY_CLASSES, ClassRoofline
from warpwatch_diagnosis.words import duration, percent, short

_TRAINING = ("python", "-u", "train.py")
_SERVING = ("python", "-u", "serve.py")
# The sections beside the speed of light, by the kernel's limit: memory, arithmetic, grid.
_MEMORY = ("MemoryWorkloadAnalysis", "SourceCounters")
_COMPUTE = ("ComputeWorkloadAnalysis", "WarpStateStats")
_GRID = ("LaunchStats", "Occupancy")
# Below one block per SM the grid does not fill the device.
FULL_GRID = 1.0
LAUNCHES = 3
_NSYS = (
    "--trace=cuda,nvtx,osrt", "--capture-range=cudaProfilerApi", "--capture-range-end=stop",
    "--pytorch=autograd-nvtx", "--python-sampling=true", "--python-backtrace=cuda",
    "--cuda-graph-trace=node", "--sample=none", "--output=warpwatch",
)  # fmt: skip
# Lines with these beginnings must stay whole.
WHOLE = ("ncu ", "nsys ", "https://")
_BARE = re.compile(
    r"(?:void\s+)?(?:[\w~]+::|\(anonymous namespace\)::|\{anonymous\}::)*([A-Za-z_]\w*)"
)


def commands(measures: Measures) -> Iterator[tuple[str, str]]:
    """Yield titles with shell commands, and with the hottest kernel's place on the roofline."""
    gpu = measures.gpu
    if gpu is None or measures.is_amd:
        return
    # Replaying a collective can hang.
    kernel = next((k for k in gpu.kernel_times if k.kernel_class != "communication"), None)
    if kernel is not None:
        classes = measures.roofline.classes if measures.roofline else ()
        known = next((c for c in classes if c.kernel_class == kernel.kernel_class), None)
        yield "Hottest kernel", _place(kernel, known, measures)
        yield "Nsight Compute", _ncu(kernel, known, measures)
    yield (
        "Nsight Systems, with torch.cuda.profiler.start() and stop() around some steps",
        shlex.join(("nsys", "profile", *_NSYS, *_program(measures))),
    )


def lines(measures: Measures) -> Iterator[tuple[str, str]]:
    """Yield the commands, and a link that shows the longest step of an opened trace."""
    yield from commands(measures)
    if measures.steps:
        begin_us, end_us = max(measures.steps, key=lambda step: step[1] - step[0])
        yield (
            "Perfetto, with the longest step in view (open the trace file there)",
            f"https://ui.perfetto.dev/#!/?visStart={round(begin_us * 1e3)}"
            f"&visEnd={round(end_us * 1e3)}",
        )


def _place(kernel: KernelTime, known: ClassRoofline | None, measures: Measures) -> str:
    share = percent(measures.share_of_us(kernel.total_us))
    spent = f"{duration(kernel.total_us)} in {kernel.count:,} calls"
    text = f"{short(kernel.name)}: {spent}, {share} of the step"
    if known is None or known.bound is None:
        return f"{text}; its place on the roofline is not known without record_shapes=True"
    text += f"; {kernel.kernel_class} is limited by {_limit(kernel, known)}"
    if known.intensity is not None:
        text += f" at {known.intensity:.1f} FLOP a byte"
    if known.flops_ratio is not None and known.bandwidth_ratio is not None:
        text += (
            f", {percent(known.flops_ratio)} of the peak arithmetic and at least "
            f"{percent(known.bandwidth_ratio)} of the memory's bandwidth"
        )
    return text


def _limit(kernel: KernelTime, known: ClassRoofline | None) -> str:
    if kernel.blocks_per_sm is not None and kernel.blocks_per_sm < FULL_GRID:
        return "its grid, which does not fill the device"
    if known is not None and known.bound is not None:
        return "memory" if known.bound == "memory" else "arithmetic"
    return "memory" if kernel.kernel_class in MEMORY_CLASSES else "arithmetic"


def _ncu(kernel: KernelTime, known: ClassRoofline | None, measures: Measures) -> str:
    """Return the command for calls in a step after the first ones, which warm caches up."""
    limit = _limit(kernel, known)
    more = {"memory": _MEMORY, "arithmetic": _COMPUTE}.get(limit, _GRID)
    sections = [f"--section={name}" for name in ("SpeedOfLight", *more)]
    skip = max(1, kernel.count // measures.step_count)
    options = (
        "--target-processes=all", "--kernel-name-base=function",
        f"--kernel-name=regex:{_regex(kernel.name)}",
        f"--launch-skip={skip}", f"--launch-count={LAUNCHES}", *sections, "--export=warpwatch",
    )  # fmt: skip
    return shlex.join(("ncu", *options, *_program(measures)))


def _program(measures: Measures) -> tuple[str, ...]:
    return _SERVING if measures.server else _TRAINING


def _regex(name: str) -> str:
    """Match the function of a demangled name without return type, namespace and arguments."""
    match = _BARE.match(name)
    return f"^{match[1]}$" if match and match[1] else re.escape(name[:80])
