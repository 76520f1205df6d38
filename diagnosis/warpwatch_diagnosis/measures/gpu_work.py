"""Provides the GPU's kernels and copies with the calls that launched them, and sums each kind.

The class of a kernel comes from its name alone: PyTorch's own kernels, those of cuBLAS, cuDNN,
CUTLASS, NCCL, rocBLAS, MIOpen, FlashAttention, Apex, Transformer Engine and Inductor's Triton.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from operator import attrgetter
from pathlib import Path
from statistics import median
from typing import Literal, NamedTuple, cast

from warpwatch_diagnosis.intervals import Interval, Intervals, clip, difference, total, union
from warpwatch_diagnosis.trace.events import RuntimeCalls, TraceEvent, by_begin, grouped
from warpwatch_diagnosis.trace.reader import Trace

ALL_TO_ALL = re.compile(r"all_?to_?all", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class GpuWork:
    """A trace's kernels and copies by begin, and both together in ``events``.

    window: the time that is measured. calls: the calls of the runtime. exchanges: the all-to-alls
    among the host's operators and annotations, by begin.
    """

    window: Interval
    kernels: Sequence[TraceEvent]
    copies: Sequence[TraceEvent]
    events: Sequence[TraceEvent]
    calls: RuntimeCalls
    exchanges: Sequence[TraceEvent]

    @classmethod
    def of(cls, trace: Trace, window: Interval) -> GpuWork:
        kernels, copies = trace.events["kernel"], trace.events["copy"]
        host = trace.events["annotation"] + trace.events["operator"]
        exchanging = {name for name in {e.name for e in host} if ALL_TO_ALL.search(name)}
        return cls(
            window=window,
            kernels=by_begin(kernels, _order),
            copies=by_begin(copies, _order),
            events=by_begin(kernels + copies, _order),
            calls=by_correlation(trace.events["runtime"]),
            exchanges=sorted((e for e in host if e.name in exchanging), key=attrgetter("begin_us")),
        )

    @property
    def threads(self) -> set[str]:
        """The threads that launch GPU work."""
        calls = self.calls
        return {call.thread for e in self.events if (call := calls.get(e.correlation))}

    def of_device(self, name: str) -> GpuWork:
        return replace(
            self,
            kernels=[e for e in self.kernels if device_of(e) == name],
            copies=[e for e in self.copies if device_of(e) == name],
            events=[e for e in self.events if device_of(e) == name],
        )


def by_correlation(events: Iterable[TraceEvent]) -> RuntimeCalls:
    """Return the first event of each correlation; the order of ``events`` does not matter."""
    ordered = by_begin(events, attrgetter("end_us", "thread", "name"))
    found = {event.correlation: event for event in reversed(ordered)}
    found.pop(None, None)
    return found


def device_of(event: TraceEvent) -> str:
    """Return the index of the device: an argument of the event, else its process ID."""
    index = event.whole("device")
    return event.thread.partition("/")[0] if index is None else str(index)


def _order(event: TraceEvent) -> tuple[float, int, str, str]:
    """Return the order among events that begin at one instant."""
    return event.end_us, event.correlation or -1, event.thread, event.name


KernelClass = Literal[
    "gemm", "convolution", "attention", "normalization", "softmax", "elementwise", "reduction",
    "optimizer", "indexing", "copy", "communication", "triton_fused", "other",
]  # fmt: skip

TOP = 20
# A kernel shorter than this does less work than its launch (TraceLens).
SHORT_KERNEL_US = 10.0
# The classes and the patterns of their names; the first pattern that matches a part of the name
# decides. Communication has NCCL, RCCL (whose kernels are named ncclDevKernel_*), oneCCL, HCCL,
# MSCCL++, NVSHMEM, DeepEP, PyTorch's symmetric memory and vLLM's own all-reduce.
_ROWS = Path(__file__).with_name("kernel_classes.tsv").read_text(encoding="utf-8").splitlines()
_CLASSES = tuple((known, re.compile(pattern)) for known, pattern in (r.split("\t") for r in _ROWS))


@lru_cache(maxsize=16_384)
def classify(name: str) -> KernelClass:
    """Return the class of a kernel by its name, ``other`` if it is unknown."""
    found = (known for known, pattern in _CLASSES if pattern.search(name))
    return cast(KernelClass, next(found, "other"))


@dataclass(frozen=True, slots=True)
class KernelTime:
    """All kernels of one name. Sums of durations (not unions), clipped to the window.

    blocks_per_sm, occupancy_ratio: the profiler's estimates, weighted by duration; None without.
    """

    name: str
    kernel_class: KernelClass
    count: int
    total_us: float
    median_us: float
    longest_us: float
    blocks_per_sm: float | None
    occupancy_ratio: float | None


@dataclass(frozen=True, slots=True)
class ClassTime:
    """All kernels of one class. ``total_us``: sum of durations; ``busy_us``: their union.

    short_count: the kernels under SHORT_KERNEL_US. underfilled_us: time in kernels with less than
    one block per SM. blocks_per_sm, occupancy_ratio: as in KernelTime.
    """

    kernel_class: KernelClass
    count: int
    total_us: float
    busy_us: float
    short_count: int
    underfilled_us: float
    blocks_per_sm: float | None
    occupancy_ratio: float | None


class _Run(NamedTuple):
    """One kernel: µs in the window and in all; blocks per SM and occupancy in %."""

    begin_us: float
    end_us: float
    spent_us: float
    whole_us: float
    blocks: float | None
    occupancy: float | None


def kernel_times(
    kernels: Sequence[TraceEvent], window: Interval
) -> tuple[tuple[KernelTime, ...], tuple[ClassTime, ...]]:
    """Return the TOP names by time and every class, longest first."""
    runs = _runs(kernels, window)
    top = sorted(runs, key=lambda name: (-sum(run.spent_us for run in runs[name]), name))[:TOP]
    classes: dict[KernelClass, list[_Run]] = defaultdict(list)
    for name, found in runs.items():
        classes[classify(name)] += found
    times = [_class_time(kernel_class, found) for kernel_class, found in classes.items()]
    return (
        tuple(_kernel_time(name, runs[name]) for name in top),
        tuple(sorted(times, key=lambda t: (-t.total_us, t.kernel_class))),
    )


def _runs(kernels: Sequence[TraceEvent], window: Interval) -> dict[str, list[_Run]]:
    low, high = window
    named: dict[str, list[_Run]] = defaultdict(list)
    for kernel in kernels:
        begin, end = max(kernel.begin_us, low), min(kernel.end_us, high)
        whole_us = kernel.end_us - kernel.begin_us
        blocks = kernel.number("blocks per SM")
        occupancy = kernel.number("est. achieved occupancy %")
        named[kernel.name].append(_Run(begin, end, end - begin, whole_us, blocks, occupancy))
    return named


def _kernel_time(name: str, runs: list[_Run]) -> KernelTime:
    spent = [run.spent_us for run in runs]
    return KernelTime(
        name=name,
        kernel_class=classify(name),
        count=len(runs),
        total_us=math.fsum(spent),
        median_us=median(spent),
        longest_us=max(spent),
        blocks_per_sm=_mean((run.blocks, run.spent_us) for run in runs),
        occupancy_ratio=_occupancy_ratio(runs),
    )


def _class_time(kernel_class: KernelClass, runs: list[_Run]) -> ClassTime:
    return ClassTime(
        kernel_class=kernel_class,
        count=len(runs),
        total_us=math.fsum(run.spent_us for run in runs),
        busy_us=total(union((run.begin_us, run.end_us) for run in runs)),
        short_count=sum(run.whole_us < SHORT_KERNEL_US for run in runs),
        underfilled_us=math.fsum(
            run.spent_us for run in runs if run.blocks is not None and run.blocks < 1
        ),
        blocks_per_sm=_mean((run.blocks, run.spent_us) for run in runs),
        occupancy_ratio=_occupancy_ratio(runs),
    )


def _occupancy_ratio(runs: list[_Run]) -> float | None:
    percentage = _mean((run.occupancy, run.spent_us) for run in runs)
    return None if percentage is None else min(1.0, max(0.0, percentage / 100))


def _mean(weighted: Iterable[tuple[float | None, float]]) -> float | None:
    """Return the mean of (value, weight) over the pairs that have a value."""
    known = [(value * weight, weight) for value, weight in weighted if value is not None]
    weight = math.fsum(weight for _, weight in known)
    return math.fsum(product for product, _ in known) / weight if weight else None


# Kernels at the same clock differ by less from run to run, and their ratios spread less (reference
# values of this project).
MIN_SLOWDOWN = 1.05
MAX_SPREAD = 0.03
# This share of the time in kernels must agree on the factor (our own value).
MIN_AGREEING_SHARE = 0.70
# Name and grid, () if the trace has no grid: a name alone mixes sizes, as forward and backward.
Size = tuple[str, tuple[object, ...]]


@dataclass(frozen=True, slots=True)
class SizeTime:
    """All kernels of one name and grid that the window launched, except collectives.

    Launches count, not runs: how many kernels run in the window depends on the host's lead.
    """

    count: int
    total_us: float
    median_us: float


def size_times(work: GpuWork) -> dict[Size, SizeTime]:
    """Sum the kernels; one whose launch is unknown counts where it begins."""
    low, high = work.window
    found: dict[Size, list[float]] = defaultdict(list)
    for kernel in work.kernels:
        launched = work.calls.get(kernel.correlation, kernel)
        if low <= launched.begin_us < high and classify(kernel.name) != "communication":
            found[_size(kernel)].append(kernel.end_us - kernel.begin_us)
    return {
        size: SizeTime(len(durations), sum(sorted(durations)), median(durations))
        for size, durations in found.items()
    }


def _size(kernel: TraceEvent) -> Size:
    grid = kernel.arguments.get("grid") if kernel.arguments else None
    known = isinstance(grid, list) and all(isinstance(blocks, int) for blocks in grid)
    return kernel.name, tuple(grid) if known and grid else ()


def slowdown(now: Mapping[Size, SizeTime], before: Mapping[Size, SizeTime]) -> float | None:
    """Return the factor by which nearly all kernels are slower, or None.

    Their number does not matter: a slower device does less in the same time.
    """
    weight = sum(time.total_us for time in now.values())
    known = sorted(
        (time.median_us / before[size].median_us, time.total_us)
        for size, time in now.items()
        if size in before and before[size].median_us
    )
    if not weight or sum(us for _, us in known) < MIN_AGREEING_SHARE * weight:
        return None
    factor = _weighted_median(known)
    agreeing = sum(us for ratio, us in known if abs(ratio / factor - 1) <= MAX_SPREAD)
    return factor if factor >= MIN_SLOWDOWN and agreeing >= MIN_AGREEING_SHARE * weight else None


def _weighted_median(values: Sequence[tuple[float, float]]) -> float:
    """Return the weighted median of sorted pairs."""
    half = sum(weight for _, weight in values) / 2
    reached = accumulate(weight for _, weight in values)
    return next(value for (value, _), sofar in zip(values, reached, strict=True) if sofar >= half)


Direction = Literal["HtoD", "DtoH", "DtoD", "PtoP", "HtoH", "memset", "unknown"]
HostMemory = Literal["pageable", "pinned"]

# A copy this small carries a value that the host wants to see (reference: DtoH of at most 64 B).
SCALAR_BYTES = 64
_PATTERNS: tuple[tuple[Direction, str], ...] = (
    ("memset", r"memset"),
    ("HtoD", r"HtoD|HostToDevice|Host ?-> ?Device"),
    ("DtoH", r"DtoH|DeviceToHost|Device ?-> ?Host"),
    ("PtoP", r"PtoP|PeerToPeer"),
    ("DtoD", r"DtoD|DeviceToDevice|Device ?-> ?Device"),
    ("HtoH", r"HtoH|HostToHost"),
)
_DIRECTIONS = tuple((known, re.compile(p, re.IGNORECASE)) for known, p in _PATTERNS)


@lru_cache(maxsize=1024)
def copy_kind(name: str) -> tuple[Direction, HostMemory | None]:
    """Return direction and host memory by the profiler's name of a copy."""
    direction: Direction = next((known for known, p in _DIRECTIONS if p.search(name)), "unknown")
    memories: tuple[HostMemory, ...] = ("pageable", "pinned")
    return direction, next((memory for memory in memories if memory in name.lower()), None)


@dataclass(frozen=True, slots=True)
class CopyTime:
    """All copies of one direction and kind of host memory in the window.

    memory: host memory; None without or if unknown. total_us: sum of durations; busy_us: their
    union; exposed_us: the part of the union that no kernel hides. bytes: None if no copy has a
    size. small_count: copies of at most SCALAR_BYTES. bandwidth_gb_per_s: whole copies, also those
    that the window cuts; 1 GB = 1e9 bytes.
    """

    direction: Direction
    memory: HostMemory | None
    count: int
    bytes: int | None
    total_us: float
    busy_us: float
    exposed_us: float
    small_count: int
    bandwidth_gb_per_s: float | None


def copy_times(
    copies: Sequence[TraceEvent], kernels: Intervals, window: Interval
) -> tuple[CopyTime, ...]:
    """Return the copies, longest first; ``kernels`` is the union of what may hide them."""
    kinds = grouped(copies, lambda copy: copy_kind(copy.name))
    times = [_copy_time(key, found, kernels, window) for key, found in kinds.items()]
    return tuple(sorted(times, key=lambda t: (-t.total_us, t.direction, t.memory or "")))


def _copy_time(
    key: tuple[Direction, HostMemory | None],
    copies: list[TraceEvent],
    kernels: Intervals,
    window: Interval,
) -> CopyTime:
    spans = list(clip(((c.begin_us, c.end_us) for c in copies), window))
    busy = union(spans)
    sized = [(size, c) for c in copies if (size := c.number("bytes")) is not None]
    sizes = [size for size, _ in sized]
    copying_us = math.fsum(c.end_us - c.begin_us for _, c in sized)
    return CopyTime(
        direction=key[0],
        memory=key[1],
        count=len(copies),
        bytes=int(sum(sizes)) if sizes else None,
        total_us=total(sorted(spans)),
        busy_us=total(busy),
        exposed_us=total(difference(busy, kernels)),
        small_count=sum(size <= SCALAR_BYTES for size in sizes),
        bandwidth_gb_per_s=sum(sizes) / copying_us / 1e3 if sum(sizes) and copying_us else None,
    )
