"""Finds hosts and devices that wait for each other: for Python, launches, values and copies."""

from __future__ import annotations

from collections.abc import Iterator

from warpwatch_diagnosis.intervals import Intervals, difference, intersection, total, union
from warpwatch_diagnosis.measures.cpu_time import CpuTime
from warpwatch_diagnosis.measures.gpu_time import GpuTime
from warpwatch_diagnosis.measures.gpu_work import SHORT_KERNEL_US, CopyTime
from warpwatch_diagnosis.measures.measures import Measures
from warpwatch_diagnosis.measures.runtime_calls import SynchronizingCall
from warpwatch_diagnosis.rules.base import RankRule, advice, idle, in_lines, worst_gaps
from warpwatch_diagnosis.words import milliseconds, percent, short, times

# TraceLens flags idle time above this; a CPU's time outside operators has the same limit.
MIN_SHARE = 0.15
HIGH_SHARE = 0.30
# A cause with a name of its own needs less to be reported, as idle time after synchronizing calls.
MIN_NAMED_SHARE = 0.05
# A model that is compiled whole is a few regions, forward and optimizer (own value).
MIN_REGIONS_A_STEP = 10
# Launches are the cause if more than half of the kernels are short (TraceLens's 10 µs), and Python
# if more of the idle time than MAX_HOST_SHARE is outside operators.
MIN_SHORT_SHARE = 0.50
MAX_HOST_SHARE = 0.50


class HostBoundRule(RankRule):
    """Finds time of the host that the step waits for, without the part that other rules explain."""

    kind = "host_bound"
    high_share = HIGH_SHARE

    def lost(self, measures: Measures) -> Intervals:
        return difference(_own_time(measures), _explained(measures))

    def applies(self, measures: Measures, lost: Intervals, several: bool) -> bool:
        """Return whether the share is high, if there is also a cause with a name of its own."""
        limit = HIGH_SHARE if _explained(measures) else MIN_SHARE
        return measures.share(lost) > limit

    def evidence(self, measures: Measures, lost: Intervals) -> Iterator[str]:
        share = percent(measures.share(lost))
        if measures.gpu is not None:
            yield f"the GPU is idle for {share} of the step because the host is late"
            yield from _gaps(measures, measures.gpu, lost)
        elif measures.cpu is not None:
            yield f"{share} of the step is the host's own work around the operators"
            yield from _own_work(measures.cpu)
            yield from in_lines(measures, "host")

    def advice(self, measures: Measures) -> str:
        text = advice(self.kind, "gpu" if measures.gpu else "cpu")
        has_lines = any(in_lines(measures, "host"))
        return text if has_lines else f"{text} {advice(self.kind, 'stacks')}"


class LaunchBoundRule(HostBoundRule):
    """Finds the idle time of host_bound if the cause is many small kernels."""

    kind = "launch_bound"
    supersedes = ("host_bound",)
    needs_gpu = True

    def applies(self, measures: Measures, lost: Intervals, several: bool) -> bool:
        gpu = measures.gpu
        return (
            gpu is not None
            and super().applies(measures, lost, several)
            and gpu.kernels.short_share > MIN_SHORT_SHARE
            and total(idle(measures, "host")) < MAX_HOST_SHARE * total(lost)
        )

    def evidence(self, measures: Measures, lost: Intervals) -> Iterator[str]:
        gpu = measures.gpu
        if gpu is None:
            return
        kernels, steps = gpu.kernels, len(measures.steps)
        yield (
            f"the GPU is idle for {percent(measures.share(lost))} of the step because its kernels "
            "are smaller than the price of launching them"
        )
        yield (
            f"{percent(kernels.short_share)} of {kernels.count:,} kernels are shorter than "
            f"{SHORT_KERNEL_US:.0f} µs; the median runs {kernels.median_us:.0f} µs and its launch "
            f"takes {kernels.median_launch_us:.0f} µs"
        )
        if steps:
            spent = milliseconds(gpu.launches.total_call_us / steps)
            yield f"{gpu.launches.count // steps:,} launches a step keep the host busy for {spent}"
        often = max(gpu.kernel_times, key=lambda k: k.count, default=None)
        if often is not None:
            yield (
                f"most often launched: {short(often.name)}, {often.count:,} times, "
                f"{often.median_us:.1f} µs each"
            )

    def advice(self, measures: Measures) -> str:
        return advice(self.kind)


def reading(measures: Measures) -> Intervals:
    """Return the loops that read values one by one without a GPU, if they are worth a finding.

    In compiled code such a read is a graph break.
    """
    if measures.cpu is None:
        return []
    loops = difference(measures.cpu.reading, measures.host.compiled_spans)
    return loops if measures.share(loops) > MIN_NAMED_SHARE else []


def saving(measures: Measures) -> Intervals:
    """Return the gaps that probably write a checkpoint, if they are worth a finding."""
    gaps = measures.cpu.saving if measures.cpu else []
    return gaps if measures.share(gaps) > MIN_NAMED_SHARE else []


def graph_breaks(measures: Measures) -> Intervals:
    """Return the host's time between many pieces of compiled code, if it is worth a finding.

    Pieces of only one function are not graph breaks: layers may be compiled one by one.
    """
    host = measures.host
    many = host.compiled_regions > MIN_REGIONS_A_STEP * measures.step_count
    if not many or host.compiled_frames < 2:
        return []
    between = intersection(_own_time(measures), host.compiled_spans)
    return between if measures.share(between) > MIN_NAMED_SHARE else []


def _explained(measures: Measures) -> Intervals:
    return union(reading(measures) + saving(measures) + graph_breaks(measures))


def _own_time(measures: Measures) -> Intervals:
    """Return the time in which the host launched, ran operators or did something without a name.

    With a GPU only its idle time counts, without one short operators and the time outside of
    operators, loading and collectives.
    """
    if measures.gpu is not None:
        return idle(measures, "host", "dispatch", "launch")
    return union(measures.cpu.host + measures.cpu.dispatch) if measures.cpu else []


def _gaps(measures: Measures, gpu: GpuTime, lost: Intervals) -> Iterator[str]:
    launch, dispatch, host = (
        milliseconds(total(idle(measures, cause))) for cause in ("launch", "dispatch", "host")
    )
    yield (
        f"{milliseconds(total(lost))} of idle time ended with a launch that came only "
        f"after the GPU had run dry; meanwhile the host launched for {launch}, ran operators for "
        f"{dispatch}, and was outside of them for {host}"
    )
    yield (
        f"the median kernel runs {gpu.kernels.median_us:.0f} µs and its launch takes "
        f"{gpu.kernels.median_launch_us:.0f} µs"
    )
    longest = [
        f"{o.name}{f' at {o.place}' if o.place else ''} {milliseconds(o.self_us)}"
        for o in measures.operators.by_self_time[:2]
    ]
    if longest:
        yield f"operators that took the host longest: {', '.join(longest)}"
    yield from worst_gaps(measures, "host")


def _own_work(cpu: CpuTime) -> Iterator[str]:
    gaps = sorted((end - begin for begin, end in cpu.host), reverse=True)
    yield (
        f"{milliseconds(sum(gaps))} lie between operators, outside data loading and collectives; "
        f"the longest gaps took {', '.join(milliseconds(us) for us in gaps[:3])}"
    )
    yield (
        f"{cpu.dispatch_count:,} of {cpu.operators_count:,} operators are shorter than 10 µs and "
        f"take {milliseconds(total(cpu.dispatch))} together, mostly the price of calling them"
    )


# The limit without a GPU, as for the host's own time.
HIGH_CPU_SHARE = 0.20
# PCIe 4 x16 moves about 25 GB/s from pinned memory; half of it is slow (reference value).
SLOW_GB_PER_S = 12.5
_SHOWN = 3


class SyncBoundRule(RankRule):
    """Finds a host that waits for the device, which then waits for the host: `.item()` in the loop.

    A long wait while the device works does not affect the step. The idle time after it counts: the
    host had no work queued and must build its lead again. Without a GPU nothing waits for a device,
    but loops that read value after value would wait for one each time.
    """

    kind = "sync_bound"
    # The limit on idle time after synchronizing calls (reference value of this project).
    min_share = 0.05
    high_share = 0.15

    def lost(self, measures: Measures) -> Intervals:
        return idle(measures, "synchronization") if measures.gpu else reading(measures)

    def is_sure(self, measures: Measures, lost: Intervals) -> bool:
        return measures.share(lost) > (self.high_share if measures.gpu else HIGH_CPU_SHARE)

    def evidence(self, measures: Measures, lost: Intervals) -> Iterator[str]:
        return _waits(measures, lost) if measures.gpu else _loops(measures, lost)

    def advice(self, measures: Measures) -> str:
        if measures.gpu is None:
            return advice(self.kind, "cpu")
        calls = _culprits(measures)
        # Most trainings read a value now and then.
        purpose = calls[0].purpose if calls else "wait"
        places = (call.place for call in calls if call.purpose == purpose)
        line = next((f" ({place})" for place in places if place), "")
        return advice(self.kind, purpose, line=line)


def _loops(measures: Measures, lost: Intervals) -> Iterator[str]:
    found = measures.synchronization
    yield (
        f"{percent(measures.share(lost))} of the step is loops that read one value after the other"
    )
    yield (
        f"{found.count / measures.step_count:,.0f} values are read a step (.item(), float(), bool()"
        f" of a tensor); the loops take {milliseconds(total(lost))} together"
    )
    # The count shows the loop: a single read takes no time of its own.
    for call in sorted(found.calls, key=lambda call: -call.count)[:_SHOWN]:
        if call.place:
            yield f"{call.name} at {call.place} ran {times(call.count)}"


def _culprits(measures: Measures) -> list[SynchronizingCall]:
    """Return the longest calls that wait for a value or for the device, not for copied data."""
    calls = measures.synchronization.calls
    return [c for c in calls if c.purpose != "copy"][:_SHOWN]


def _waits(measures: Measures, lost: Intervals) -> Iterator[str]:
    yield (
        f"the GPU is idle for {percent(measures.share(lost))} of the step because the host waited "
        "for it and had nothing queued afterwards"
    )
    for call in _culprits(measures):
        under = f" under {short(call.operator)}" if call.operator else ""
        at = f" at {call.place}" if call.place else ""
        yield (
            f"{short(call.name)}{under}{at} waited {times(call.count)} for "
            f"{milliseconds(call.total_us)} together, {milliseconds(call.longest_us)} at most"
        )
    found = measures.synchronization
    if found.per_step:
        yield f"{found.count / len(found.per_step):,.1f} synchronizing calls a step"
    yield from worst_gaps(measures, "synchronization")


class TransferBoundRule(RankRule):
    """Finds copies between host and device that no compute hides."""

    kind = "transfer_bound"
    # TraceLens flags exposed copies above this share of the step.
    min_share = 0.05
    high_share = 0.15
    needs_gpu = True

    def lost(self, measures: Measures) -> Intervals:
        """Return exposed copies and the idle time for them, without those of a checkpoint."""
        transfers = measures.gpu.exposed_transfers if measures.gpu else []
        exposed = difference(transfers, measures.host.checkpoint.intervals)
        return union(exposed + idle(measures, "copy"))

    def evidence(self, measures: Measures, lost: Intervals) -> Iterator[str]:
        share, waiting_us = percent(measures.share(lost)), total(idle(measures, "copy"))
        yield f"{share} of the step is copies between host and GPU that no compute hides"
        yield from (_sentence(copy) for copy in _crossing(measures) if copy.exposed_us)
        if waiting_us:
            yield f"the GPU stood idle for {milliseconds(waiting_us)} around them"
        calls = [c for c in measures.synchronization.calls if c.purpose == "copy"]
        lines = list(dict.fromkeys(c.place for c in calls if c.place))
        if lines:
            yield f"the host waits for copies at {', '.join(lines[:_SHOWN])}"

    def advice(self, measures: Measures) -> str:
        # Most trainings also copy a few bytes slowly.
        worst = next(iter(_crossing(measures)), None)
        if worst is None:
            return advice(self.kind, "stream")
        if worst.memory == "pageable":
            return advice(self.kind, "pageable")
        slow = (worst.bandwidth_gb_per_s or SLOW_GB_PER_S) < SLOW_GB_PER_S
        return advice(self.kind, "bus" if slow else "stream")


def _crossing(measures: Measures) -> list[CopyTime]:
    copies = measures.gpu.copy_times if measures.gpu else ()
    crossing = [c for c in copies if c.direction in ("HtoD", "DtoH")]
    return sorted(crossing, key=lambda c: (-c.exposed_us, -c.busy_us))[:_SHOWN]


def _sentence(copy: CopyTime) -> str:
    side = "from" if copy.direction == "HtoD" else "to"
    memory = f" {side} {copy.memory} memory" if copy.memory else ""
    text = (
        f"{copy.direction}{memory} ran {times(copy.count)} for {milliseconds(copy.busy_us)}, "
        f"{milliseconds(copy.exposed_us)} of it alone"
    )
    rate = copy.bandwidth_gb_per_s
    return f"{text}: {copy.bytes / 1e6:,.1f} MB at {rate:.1f} GB/s" if copy.bytes and rate else text
