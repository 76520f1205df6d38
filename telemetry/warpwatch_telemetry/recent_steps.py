"""The steps of a rank: how long all of them took, and the newest, with its pace."""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from warpwatch_telemetry.records import Step
from warpwatch_telemetry.state import STEP_DURATION_BOUNDS_S, Histogram

RECENT_STEPS = 120
# Of which the throughput is taken: few, so that it follows.
THROUGHPUT_STEPS = 20


class StepDurations:
    """A histogram that grows step by step."""

    def __init__(self, counts: Sequence[int] | None = None, sum_s: float = 0.0) -> None:
        """Continue from saved ``counts``. Raises ValueError if they are of other buckets."""
        buckets = len(STEP_DURATION_BOUNDS_S) + 1
        self.counts = [0] * buckets if counts is None else list(counts)
        self.sum_s = sum_s
        if len(self.counts) != buckets:
            raise ValueError("saved with other buckets")

    def add(self, duration_s: float) -> None:
        self.counts[bisect.bisect_left(STEP_DURATION_BOUNDS_S, duration_s)] += 1
        self.sum_s += duration_s

    def histogram(self) -> Histogram:
        return Histogram(tuple(self.counts), self.sum_s)


class RecentSteps:
    """Iterates over the durations in seconds, oldest first; any thread may do so meanwhile."""

    def __init__(self) -> None:
        self._durations_s: deque[float] = deque(maxlen=RECENT_STEPS)
        # Seconds, samples, tokens and seconds in phase comm.
        self._newest: deque[tuple[float, int, int, float | None]] = deque(maxlen=THROUGHPUT_STEPS)

    def add(self, step: Step) -> None:
        self._durations_s.append(step.duration_s)
        comm_s = step.phases_s.get("comm")
        self._newest.append((step.duration_s, step.samples, step.tokens, comm_s))

    def __len__(self) -> int:
        return len(self._durations_s)

    def __iter__(self) -> Iterator[float]:
        return iter(self._durations_s.copy())

    def pace(self) -> dict[str, Any]:
        """Steps, samples and tokens a second, and ``comm_s``, the seconds a step in phase comm.

        All of the same steps; what is not known is not there.
        """
        if not self._newest:
            return {}
        durations_s, samples, tokens, comm_s = zip(*self._newest.copy(), strict=True)
        taken_s, waits_s = sum(durations_s), [wait_s for wait_s in comm_s if wait_s is not None]
        counts = {"steps": len(durations_s), "samples": sum(samples), "tokens": sum(tokens)}
        found = {f"{what}_per_s": n / taken_s for what, n in counts.items() if n and taken_s}
        return found | ({"comm_s": sum(waits_s) / len(waits_s)} if waits_s else {})
