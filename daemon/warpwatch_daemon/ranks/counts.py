"""What is counted of a rank over its processes and restarts of the daemon; its newest steps."""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from warpwatch import protocol
from warpwatch.protocol import MAX_PHASES
from warpwatch_telemetry.records import Step
from warpwatch_telemetry.state import STEP_DURATION_BOUNDS_S, Histogram

RECENT_STEPS = 120
# Of which the throughput is taken: few, so that it follows.
THROUGHPUT_STEPS = 20

_TOTALS = ("steps", "samples", "tokens")
_NO_TOTALS = protocol.Totals(0, 0, None, 0, 0, 0, ())


class RankCounts:
    """``header``: what the ring of the process that runs now has counted.

    recorded: what only records and the kernel say of it, by name; what was not said is not there.
    """

    def __init__(self) -> None:
        self.header = _NO_TOTALS
        self.recorded: dict[str, int] = {}
        self.lost = 0
        self._buckets = [0] * (len(STEP_DURATION_BOUNDS_S) + 1)
        self._sum_s = 0.0
        # What the processes before this one counted.
        self._before: dict[str, Any] = {"phases_s": {}, "recorded": {}, **dict.fromkeys(_TOTALS, 0)}

    def begin_process(self, phases: Sequence[str]) -> None:
        """Another process goes on. ``phases``: the names of those that the last one counted."""
        self._before = self.totals(phases)
        self.header, self.recorded = _NO_TOTALS, {}

    def take(self, counts: Mapping[str, int]) -> None:
        """Counts since the process began: the newest says it all, and never less than before."""
        for name, count in counts.items():
            self.recorded[name] = max(count, self.recorded.get(name, 0))

    def grow(self, counts: Mapping[str, int]) -> None:
        """By what was counted since the last call."""
        for name, count in counts.items():
            self.recorded[name] = self.recorded.get(name, 0) + count

    def add_step(self, duration_s: float) -> None:
        self._buckets[bisect.bisect_left(STEP_DURATION_BOUNDS_S, duration_s)] += 1
        self._sum_s += duration_s

    @property
    def durations(self) -> Histogram:
        return Histogram(tuple(self._buckets), self._sum_s)

    def totals(self, phases: Sequence[str]) -> dict[str, Any]:
        """Over all processes: ``steps``, ``samples``, ``tokens``, ``phases_s`` and ``recorded``."""
        before = self._before
        now_s = [ns / 1e9 for ns in self.header.phases_ns]
        phases_s = added(phases, now_s, before["phases_s"])
        names = {**before["recorded"], **self.recorded}
        recorded = {n: before["recorded"].get(n, 0) + self.recorded.get(n, 0) for n in names}
        counts = {name: before[name] + getattr(self.header, name) for name in _TOTALS}
        return {**counts, "phases_s": phases_s, "recorded": recorded}

    def shown(self, phases: Sequence[str]) -> dict[str, Any]:
        """Fields of RankState."""
        totals = self.totals(phases)
        recorded = totals["recorded"]
        return {
            **{f"{name}_total": totals[name] for name in _TOTALS},
            "phases_s": totals["phases_s"],
            "durations": self.durations,
            "lost_records": self.lost,
            "gc_s": _seconds(recorded.get("gc_ns")),
            "gc_collections_total": recorded.get("gc_collections"),
            "allocation_retries_total": recorded.get("allocation_retries"),
            "out_of_memory_errors_total": recorded.get("out_of_memory_errors"),
            "core_wait_s": _seconds(recorded.get("core_wait_ns")),
            "throttled_s": _seconds(recorded.get("throttled_ns")),
        }

    def save(self) -> dict[str, Any]:
        return {
            "base": self._before,
            "recorded": self.recorded,
            "lost": self.lost,
            "counts": self._buckets,
            "sum_s": self._sum_s,
        }

    def restore(self, saved: dict[str, Any], names: PhaseNames) -> None:
        """Go on from ``save``'s answer. Raises KeyError, TypeError or ValueError on nonsense."""
        buckets = [int(count) for count in saved["counts"]]
        if len(buckets) != len(self._buckets):
            raise ValueError("saved with other buckets")
        before = {key: saved["base"][key] for key in _TOTALS}
        phases_s = dict(saved["base"]["phases_s"])
        before["phases_s"] = added(names.admit(phases_s), phases_s.values())
        before["recorded"] = _integers(saved["base"]["recorded"])
        self.recorded = _integers(saved["recorded"])
        self._sum_s, self.lost = float(saved["sum_s"]), int(saved["lost"])
        self._before, self._buckets = before, buckets


def added(
    names: Iterable[str], values: Iterable[float], to: Mapping[str, float] | None = None
) -> dict[str, float]:
    """The sums by name; the same name may come more than once."""
    sums = dict(to or {})
    for name, value in zip(names, values, strict=False):
        sums[name] = sums.get(name, 0.0) + value
    return sums


def _seconds(nanoseconds: int | None) -> float | None:
    return None if nanoseconds is None else nanoseconds / 1e9


def _integers(counts: Any) -> dict[str, int]:
    return {name: int(count) for name, count in dict(counts).items()}


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


MAX_PHASES_PER_JOB = 64
OTHER = "other"


class PhaseNames:
    """Of one rank: few, however many its processes think of; what is beyond is ``other``.

    Each name is a series, and is kept for as long as the rank. ``of_job``: the names of all ranks
    of its job, which add to it.
    """

    def __init__(self, of_job: set[str]) -> None:
        self.of_job = of_job
        self._own: set[str] = set()

    def admit(self, names: Iterable[str]) -> list[str]:
        """The same number of names, each as it is shown."""
        return [self._admit(name) for name in names]

    def _admit(self, name: str) -> str:
        if name in self._own or name == OTHER:
            return name
        is_new = name not in self.of_job
        if len(self._own) >= MAX_PHASES or (is_new and len(self.of_job) >= MAX_PHASES_PER_JOB):
            return OTHER
        self._own.add(name)
        self.of_job.add(name)
        return name
