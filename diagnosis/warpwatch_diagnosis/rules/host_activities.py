"""Finds faults that have a name of their own in the trace: activities of the host in the step."""

from __future__ import annotations

from collections.abc import Iterator

from warpwatch_diagnosis.intervals import Intervals, difference, longest_us, total, union, within
from warpwatch_diagnosis.measures.host_events import HostActivity
from warpwatch_diagnosis.measures.measures import Measures
from warpwatch_diagnosis.rules.base import RankRule, advice, idle, in_lines, worst_gaps
from warpwatch_diagnosis.rules.host_bound import graph_breaks, saving
from warpwatch_diagnosis.words import milliseconds, percent, times

# Without a GPU a loader without workers is work like any other up to TraceML's warning level; with
# workers the training process only waits.
MIN_CPU_LOADING = 0.10
# A pause this long counts if other ranks wait for it, even a single one. Unsynchronised collections
# are a known cause of slow jobs of many ranks (Understanding Stragglers in Large Model Training,
# OSDI 2025); the limit is a reference value of this project.
MIN_PAUSE_US = 50_000.0
# Allocators grow once; thrash comes back in other steps.
MIN_THRASH_STEPS = 2
# The share of the step; compilations end with the first steps (own value, as for other rare work).
MIN_COMPILE_SHARE = 0.05
_GB = 1e9


class DataLoadingRule(RankRule):
    """Finds steps that wait for their batch: iterating the DataLoader takes the time."""

    kind = "data_loading"
    # PyTorch's TensorBoard plugin warns above it; with a GPU only its idle time counts.
    min_share = 0.05
    # TraceML's critical level.
    high_share = 0.20

    def lost(self, measures: Measures) -> Intervals:
        if measures.gpu is None:
            return difference(measures.loading, measures.host.gc.intervals)
        return idle(measures, "data_loading")

    def share(self, measures: Measures, lost: Intervals) -> float:
        return measures.share(measures.loading)

    def applies(self, measures: Measures, lost: Intervals, several: bool) -> bool:
        works = measures.gpu is None and _single_process(measures)
        limit = MIN_CPU_LOADING if works else self.min_share
        return bool(measures.loader) and measures.share(lost) > limit

    def evidence(self, measures: Measures, lost: Intervals) -> Iterator[str]:
        loader, loading = measures.loader, measures.loading
        longest = sorted((e.end_us - e.begin_us for e in loader), reverse=True)[:3]
        yield f"{percent(measures.share(loading))} of the step is spent fetching the next batch"
        yield (
            f"{loader[0].name} ran {times(len(loader))} for {milliseconds(total(loading))}; "
            f"the longest took {', '.join(milliseconds(us) for us in longest)}"
        )
        if measures.gpu:
            yield f"the GPU stood idle during {milliseconds(total(lost))} of it"
        if _single_process(measures):
            yield "the batches are made in the training process itself (num_workers=0)"
        yield from in_lines(measures, "loading")

    def advice(self, measures: Measures) -> str:
        return advice(self.kind, "single_process" if _single_process(measures) else "workers")


def _single_process(measures: Measures) -> bool:
    return any("SingleProcess" in e.name for e in measures.loader)


class GcPauseRule(RankRule):
    """Finds garbage collections of Python in the step, which stop every thread of the rank."""

    kind = "gc_pause"
    min_share = 0.01
    high_share = 0.05

    def lost(self, measures: Measures) -> Intervals:
        return measures.host.gc.intervals if measures.gpu is None else idle(measures, "gc")

    def applies(self, measures: Measures, lost: Intervals, several: bool) -> bool:
        delays_others = several and longest_us(lost) > MIN_PAUSE_US
        return delays_others or super().applies(measures, lost, several)

    def evidence(self, measures: Measures, lost: Intervals) -> Iterator[str]:
        pauses = measures.host.gc
        time = "the step" if measures.gpu is None else "the GPU's time"
        yield f"{percent(measures.share(lost))} of {time} passes while Python collects garbage"
        yield _sum(pauses, times(pauses.count))
        yield from in_lines(measures, "gc")

    def advice(self, measures: Measures) -> str:
        text = advice(self.kind)
        called = any("collect" in name for name in measures.host.gc.names)
        return f"Take gc.collect() out of the step; c{text[1:]}" if called else text


def _sum(activity: HostActivity, count: str) -> str:
    return (
        f"{', '.join(activity.names[:2])}: {count}, {milliseconds(activity.total_us)} together, "
        f"{milliseconds(activity.longest_us)} at most"
    )


class CheckpointRule(RankRule):
    """Finds checkpoints that are written in the step while the training waits."""

    kind = "checkpoint"
    # The share of the captured steps (own value, as for copies). Over the whole job saving seldom
    # costs as much.
    min_share = 0.05

    def lost(self, measures: Measures) -> Intervals:
        if measures.gpu is not None:
            return idle(measures, "checkpoint")
        return union(measures.host.checkpoint.intervals + saving(measures))

    def is_sure(self, measures: Measures, lost: Intervals) -> bool:
        return measures.host.checkpoint.count > 1

    def evidence(self, measures: Measures, lost: Intervals) -> Iterator[str]:
        written, share = measures.host.checkpoint, percent(measures.share(lost))
        if measures.gpu is not None:
            yield f"the GPU is idle for {share} of the steps while a checkpoint is written"
        else:
            yield f"{share} of the steps is the writing of a checkpoint"
        seen = ", ".join(written.names[:2]) or (
            "gaps right after aten::detach of every parameter, as state_dict() makes before a save"
        )
        yield (
            f"{seen}: {times(written.count or len(saving(measures)))}, {milliseconds(total(lost))} "
            f"together, {milliseconds(longest_us(lost))} at most"
        )
        yield from _frequency(measures, lost)
        yield from in_lines(measures, "checkpoint")


def _frequency(measures: Measures, lost: Intervals) -> Iterator[str]:
    """Yield the cost of the same if it is done less often."""
    steps, saving_steps = measures.steps, _steps_with(measures, lost)
    if not saving_steps:
        return
    saved = f"{saving_steps} of {len(steps)} captured steps save"
    step_us = (measures.window_us - total(lost)) / len(steps)
    if step_us <= 0:
        yield f"{saved} and do nothing else"
        return
    every = max(1, round(total(lost) / saving_steps / step_us / 0.01))
    yield f"{saved}; saving every {every:,} steps would cost 1 % of the time"


def _steps_with(measures: Measures, spent: Intervals) -> int:
    return sum(us > 0 for us in within(spent, measures.steps))


class AllocatorThrashRule(RankRule):
    """Finds an allocator that asks the driver for memory in the middle of training.

    A warm allocator serves every step from its pools. Calls of cudaMalloc and cudaFree in the
    steady state mean that sizes change or memory is short; cudaFree also waits for the device.
    """

    kind = "allocator_thrash"
    # The share of the step that the device idles under the calls, as for other idle time
    # (TensorBoard).
    min_share = 0.05
    high_share = 0.15
    needs_gpu = True

    def lost(self, measures: Measures) -> Intervals:
        return idle(measures, "allocator")

    def applies(self, measures: Measures, lost: Intervals, several: bool) -> bool:
        calls = measures.host.allocator.intervals
        enough = not measures.steps or _steps_with(measures, calls) >= MIN_THRASH_STEPS
        return enough and super().applies(measures, lost, several)

    def evidence(self, measures: Measures, lost: Intervals) -> Iterator[str]:
        calls = measures.host.allocator
        yield (
            f"the GPU is idle for {percent(measures.share(lost))} of the step because memory is "
            "asked of the driver or given back"
        )
        yield (
            f"{', '.join(calls.names[:3])} ran {times(calls.count)} for "
            f"{milliseconds(calls.total_us)}, {milliseconds(calls.longest_us)} at most"
        )
        if measures.steps:
            yield f"in {_steps_with(measures, calls.intervals)} of {len(measures.steps)} steps"
        for memory in measures.memory:
            allocated, reserved = memory.allocated_peak_bytes, memory.reserved_peak_bytes
            if memory.device != "cpu" and reserved and allocated:
                yield (
                    f"at most {allocated / _GB:.1f} GB were allocated of "
                    f"{reserved / _GB:.1f} GB reserved"
                )
        yield from worst_gaps(measures, "allocator")


class RecompilationRule(RankRule):
    """Finds a torch.compile that costs more than it saves: recompilations and graph breaks.

    The lost time counts only in parts that are each worth a finding, so there is no ``min_share``.
    """

    kind = "recompilation"

    def lost(self, measures: Measures) -> Intervals:
        return union(_compiling(measures) + graph_breaks(measures))

    def is_sure(self, measures: Measures, lost: Intervals) -> bool:
        return bool(_compiling(measures)) and _compiles_again(measures)

    def evidence(self, measures: Measures, lost: Intervals) -> Iterator[str]:
        compiling, breaks = _compiling(measures), graph_breaks(measures)
        if compiling:
            yield from _compilations(measures, percent(measures.share(compiling)))
        if breaks:
            yield from _breaks(measures, breaks)

    def advice(self, measures: Measures) -> str:
        if not _compiling(measures):
            return advice(self.kind, "graph_breaks")
        return advice(self.kind, "again" if _compiles_again(measures) else "once")


def _compiling(measures: Measures) -> Intervals:
    """Return the compiling, with a GPU its idle time meanwhile, if it is worth a finding."""
    lost = idle(measures, "compile") if measures.gpu else measures.host.compile.intervals
    return lost if measures.share(lost) > MIN_COMPILE_SHARE else []


def _compiles_again(measures: Measures) -> bool:
    host = measures.host
    return bool(host.recompiled_regions) or _steps_with(measures, host.compile.intervals) > 1


def _compilations(measures: Measures, share: str) -> Iterator[str]:
    compiling, regions = measures.host.compile, measures.host.recompiled_regions
    idles = f"the GPU is idle for {share} of the step while"
    yield f"{idles if measures.gpu else f'in {share} of the step'} torch.compile compiles"
    steps = f"{_steps_with(measures, compiling.intervals)} of {len(measures.steps)} steps"
    yield _sum(compiling, f"{times(compiling.count)} in {steps}")
    if regions:
        yield (
            f"{regions:,} compiled regions in use (Torch-Compiled Region: "
            "frame/number above 0) were compiled because an earlier compilation did not fit"
        )
    yield from in_lines(measures, "compile")


def _breaks(measures: Measures, lost: Intervals) -> Iterator[str]:
    host = measures.host
    time = "the GPU's time is lost" if measures.gpu else "the step is lost"
    calls = host.compiled_regions / measures.step_count
    yield f"{percent(measures.share(lost))} of {time} between pieces of compiled code"
    yield (
        f"{'a step' if measures.steps else 'the trace'} calls {calls:,.0f} compiled regions of "
        f"{host.compiled_frames:,} functions; guards and Python in between take "
        f"{milliseconds(total(lost))} together"
    )
    yield from in_lines(measures, "host")
