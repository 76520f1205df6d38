"""What is counted of a rank over its processes and restarts of the daemon; its newest steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from warpwatch import protocol
from warpwatch.protocol import MAX_PHASES
from warpwatch_telemetry.recent_steps import StepDurations

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
        self.durations = StepDurations()
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
            "durations": self.durations.histogram(),
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
            "counts": self.durations.counts,
            "sum_s": self.durations.sum_s,
        }

    def restore(self, saved: dict[str, Any], names: PhaseNames) -> None:
        """Go on from ``save``'s answer. Raises KeyError, TypeError or ValueError on nonsense."""
        counts = [int(count) for count in saved["counts"]]
        durations = StepDurations(counts, float(saved["sum_s"]))
        before = {key: saved["base"][key] for key in _TOTALS}
        phases_s = dict(saved["base"]["phases_s"])
        before["phases_s"] = added(names.admit(phases_s), phases_s.values())
        before["recorded"] = _integers(saved["base"]["recorded"])
        self.recorded = _integers(saved["recorded"])
        self.lost = int(saved["lost"])
        self._before, self.durations = before, durations


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
