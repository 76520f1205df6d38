"""The host waits for the device and the device then waits for the host: `.item()` in the loop.

A long wait while the device works costs nothing by itself. What counts is the idle time after it:
the host had no work queued and must build its lead again (idle.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from warpwatch_diagnosis.measures.intervals import Intervals, total
from warpwatch_diagnosis.measures.measures import Measures
from warpwatch_diagnosis.measures.synchronization import SynchronizingCall
from warpwatch_diagnosis.rules.base import (
    Finding,
    idle,
    milliseconds,
    percent,
    short,
    times,
    worst_gaps,
)
from warpwatch_diagnosis.rules.host_bound import reading

# Idle time after synchronizing calls (reference value of this project).
MIN_SHARE = 0.05
HIGH_SHARE = 0.15
# Without a GPU; as for the host's own time.
HIGH_CPU_SHARE = 0.20
_SHOWN = 3


class SyncBound:
    kind = "sync_bound"
    supersedes: tuple[str, ...] = ()

    def share(self, measures: Measures) -> float | None:
        return measures.share(_lost(measures) if measures.gpu else reading(measures))

    def find(self, capture: Sequence[Measures]) -> list[Finding]:
        on_gpu = [self._on_gpu(m) for m in capture if _applies(m)]
        return on_gpu + [self._on_cpu(m) for m in capture if reading(m)]

    def _on_cpu(self, measures: Measures) -> Finding:
        """Nothing waits for a device here, but a GPU would be waited for each time."""
        lost = reading(measures)
        share = measures.share(lost)
        return Finding(
            kind=self.kind,
            rank=measures.rank,
            label=measures.label,
            share=share,
            recoverable_s=total(lost) / 1e6,
            confidence="high" if share > HIGH_CPU_SHARE else "medium",
            evidence=_loops(measures, lost),
            advice=(
                "Do not look at tensors value by value: sum, compare and count in tensors and read "
                "one result, .tolist() copies all values at once; read metrics every 50 steps."
            ),
        )

    def _on_gpu(self, measures: Measures) -> Finding:
        lost = _lost(measures)
        share = measures.share(lost)
        return Finding(
            kind=self.kind,
            rank=measures.rank,
            label=measures.label,
            share=share,
            recoverable_s=total(lost) / 1e6,
            confidence="high" if share > HIGH_SHARE else "medium",
            evidence=tuple(_evidence(measures, share)),
            advice=_advice(_culprits(measures)),
        )


def _applies(measures: Measures) -> bool:
    return measures.gpu is not None and measures.share(_lost(measures)) > MIN_SHARE


def _lost(measures: Measures) -> Intervals:
    return idle(measures, "synchronization")


def _loops(measures: Measures, lost: Intervals) -> tuple[str, ...]:
    found = measures.synchronization
    steps = len(measures.steps) or 1
    # What a read takes by itself says nothing here.
    often = sorted(found.calls, key=lambda call: -call.count)[:_SHOWN]
    named = [f"{c.name} at {c.place} ran {times(c.count)}" for c in often if c.place]
    return (
        f"{percent(measures.share(lost))} of the step is loops that read one value after the other",
        f"{found.count / steps:,.0f} values are read a step (.item(), float(), bool() of a "
        f"tensor); the loops take {milliseconds(total(lost))} together",
        *named,
    )


def _culprits(measures: Measures) -> list[SynchronizingCall]:
    """Calls that wait for a value or for the device, not those that move data."""
    calls = measures.synchronization.calls
    return [c for c in calls if c.purpose != "copy"][:_SHOWN]


def _evidence(measures: Measures, share: float) -> list[str]:
    sentences = [
        f"the GPU is idle for {percent(share)} of the step because the host waited for it and "
        "had nothing queued afterwards"
    ]
    sentences += [_sentence(call) for call in _culprits(measures)]
    steps = len(measures.synchronization.per_step)
    if steps:
        sentences.append(
            f"{measures.synchronization.count / steps:,.1f} synchronizing calls a step"
        )
    gaps = worst_gaps(measures, "synchronization")
    return sentences + ([gaps] if gaps else [])


def _sentence(call: SynchronizingCall) -> str:
    under = f" under {short(call.operator)}" if call.operator else ""
    at = f" at {call.place}" if call.place else ""
    return (
        f"{short(call.name)}{under}{at} waited {times(call.count)} for "
        f"{milliseconds(call.total_us)} together, {milliseconds(call.longest_us)} at most"
    )


def _advice(calls: list[SynchronizingCall]) -> str:
    reads = any(call.purpose == "read" for call in calls)
    place = next((f" ({call.place})" for call in calls if call.place), "")
    if reads:
        return (
            f"Do not read values of the GPU in every step{place}: keep losses and metrics as "
            "tensors and call .item() every 50 steps, copy with non_blocking=True, avoid boolean "
            'indexing and nonzero; torch.cuda.set_sync_debug_mode("warn") names every place.'
        )
    return (
        f"Remove torch.cuda.synchronize() and stream or event waits from the loop{place}; measure "
        "with CUDA events instead, and let the host run ahead of the GPU."
    )
