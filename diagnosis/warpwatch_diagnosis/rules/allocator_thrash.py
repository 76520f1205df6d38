"""The caching allocator asks the driver for memory in the middle of training.

A warm allocator serves every step from its pools. Calls of cudaMalloc and cudaFree in the steady
state mean that sizes change or memory is short; cudaFree waits for the device besides.
"""

from __future__ import annotations

from collections.abc import Sequence

from warpwatch_diagnosis.measures.intervals import Intervals, total, within
from warpwatch_diagnosis.measures.measures import Measures
from warpwatch_diagnosis.rules.base import Finding, idle, milliseconds, percent, times, worst_gaps

# Of the step that the device idles under the calls, as for other idle time (TensorBoard plugin).
MIN_SHARE = 0.05
HIGH_SHARE = 0.15
# Growth happens once; thrash comes back.
MIN_STEPS = 2
_GB = 1e9


class AllocatorThrash:
    kind = "allocator_thrash"
    supersedes: tuple[str, ...] = ()

    def share(self, measures: Measures) -> float | None:
        return measures.share(_lost(measures)) if measures.gpu else None

    def find(self, capture: Sequence[Measures]) -> list[Finding]:
        return [self._finding(m) for m in capture if _applies(m)]

    def _finding(self, measures: Measures) -> Finding:
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
            advice=(
                "Set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, drop "
                "torch.cuda.empty_cache() from the loop, keep shapes fixed (pad or bucket "
                "sequence lengths); if memory is short, use a smaller batch or activation "
                "checkpointing."
            ),
        )


def _applies(measures: Measures) -> bool:
    if measures.gpu is None or measures.share(_lost(measures)) <= MIN_SHARE:
        return False
    return not measures.steps or _steps(measures) >= MIN_STEPS


def _steps(measures: Measures) -> int:
    return sum(us > 0 for us in within(measures.host.allocator.intervals, measures.steps))


def _lost(measures: Measures) -> Intervals:
    return idle(measures, "allocator")


def _evidence(measures: Measures, share: float) -> list[str]:
    calls = measures.host.allocator
    sentences = [
        f"the GPU is idle for {percent(share)} of the step because memory is asked of the driver "
        "or given back",
        f"{', '.join(calls.names[:3])} ran {times(calls.count)} for "
        f"{milliseconds(calls.total_us)}, {milliseconds(calls.longest_us)} at most",
    ]
    if measures.steps:
        sentences.append(f"in {_steps(measures)} of {len(measures.steps)} steps")
    for memory in measures.memory:
        if memory.device != "cpu" and memory.reserved_peak_bytes and memory.allocated_peak_bytes:
            sentences.append(
                f"at most {memory.allocated_peak_bytes / _GB:.1f} GB were allocated of "
                f"{memory.reserved_peak_bytes / _GB:.1f} GB reserved"
            )
    gaps = worst_gaps(measures, "allocator")
    return sentences + ([gaps] if gaps else [])
