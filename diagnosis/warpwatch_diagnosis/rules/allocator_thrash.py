"""The caching allocator asks the driver for memory in the middle of training.

A warm allocator serves every step from its pools. Calls of cudaMalloc and cudaFree in the steady
state mean that sizes change or memory is short; cudaFree waits for the device besides.
"""

from __future__ import annotations

from collections.abc import Iterator

from warpwatch_diagnosis.measures.intervals import Intervals, within
from warpwatch_diagnosis.measures.measures import Measures
from warpwatch_diagnosis.rules.base import RankRule, idle, milliseconds, percent, times, worst_gaps

# Growth happens once; thrash comes back.
MIN_STEPS = 2
_GB = 1e9


class AllocatorThrashRule(RankRule):
    kind = "allocator_thrash"
    # Of the step that the device idles under the calls, as for other idle time (TensorBoard).
    min_share = 0.05
    high_share = 0.15
    needs_gpu = True

    def lost(self, measures: Measures) -> Intervals:
        return idle(measures, "allocator")

    def applies(self, measures: Measures, lost: Intervals, several: bool) -> bool:
        enough = not measures.steps or _steps_with_calls(measures) >= MIN_STEPS
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
            yield f"in {_steps_with_calls(measures)} of {len(measures.steps)} steps"
        for memory in measures.memory:
            allocated, reserved = memory.allocated_peak_bytes, memory.reserved_peak_bytes
            if memory.device != "cpu" and reserved and allocated:
                yield (
                    f"at most {allocated / _GB:.1f} GB were allocated of "
                    f"{reserved / _GB:.1f} GB reserved"
                )
        yield from worst_gaps(measures, "allocator")

    def advice(self, measures: Measures) -> str:
        return (
            "Set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, drop torch.cuda.empty_cache() "
            "from the loop, keep shapes fixed (pad or bucket sequence lengths); if memory is "
            "short, use a smaller batch or activation checkpointing."
        )


def _steps_with_calls(measures: Measures) -> int:
    return sum(us > 0 for us in within(measures.host.allocator.intervals, measures.steps))
