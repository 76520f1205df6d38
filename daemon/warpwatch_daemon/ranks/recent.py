"""The newest steps of a rank, and how fast it trains in them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from warpwatch_telemetry.records import Step

RECENT_STEPS = 120
# Of which the throughput is taken: few, so that it follows.
THROUGHPUT_STEPS = 20


class RecentSteps:
    """Iterates over the durations in seconds, oldest first; any thread may do so meanwhile."""

    def __init__(self) -> None:
        self._durations_s: deque[float] = deque(maxlen=RECENT_STEPS)
        self._newest_s: deque[float] = deque(maxlen=THROUGHPUT_STEPS)
        self._samples: deque[int] = deque(maxlen=THROUGHPUT_STEPS)
        self._tokens: deque[int] = deque(maxlen=THROUGHPUT_STEPS)

    def add(self, step: Step) -> None:
        self._durations_s.append(step.duration_s)
        self._newest_s.append(step.duration_s)
        self._samples.append(step.samples)
        self._tokens.append(step.tokens)

    def __len__(self) -> int:
        return len(self._durations_s)

    def __iter__(self) -> Iterator[float]:
        return iter(self._durations_s.copy())

    def throughput(self) -> tuple[float | None, float | None]:
        """Samples and tokens a second; None for what the program does not say."""
        taken_s, samples, tokens = sum(self._newest_s), sum(self._samples), sum(self._tokens)
        if not taken_s:
            return None, None
        return samples / taken_s if samples else None, tokens / taken_s if tokens else None
