"""Counts a rank's steps, time and memory over its processes and over restarts of the daemon."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from warpwatch import protocol
from warpwatch.protocol import MAX_PHASES
from warpwatch_telemetry.recent_steps import StepDurations

_NO_TOTALS = protocol.Totals(0, 0, None, 0, 0, 0, ())


class Totals(msgspec.Struct, frozen=True):
    """Counts over several processes. recorded: from records and the kernel, by name."""

    steps: int = 0
    samples: int = 0
    tokens: int = 0
    phases_s: dict[str, float] = {}
    recorded: dict[str, int] = {}


class SavedCounts(msgspec.Struct, frozen=True):
    """The counts of a rank as a restart finds them. base: of the processes before this one."""

    base: Totals = Totals()
    recorded: dict[str, int] = {}
    lost: int = 0
    counts: tuple[int, ...] | None = None
    sum_s: float = 0.0


class RankCounts:
    """``header``: the totals in the ring of the process that runs now.

    recorded: counts from its records and from the kernel, by name; unknown ones are absent.
    """

    def __init__(self) -> None:
        self.header = _NO_TOTALS
        self.recorded: dict[str, int] = {}
        self.lost = 0
        self.durations = StepDurations()
        # The counts of the processes before this one.
        self._before = Totals()

    def begin_process(self, phases: Sequence[str]) -> None:
        """Count another process. ``phases``: the phase names of the last one."""
        self._before = self.totals(phases)
        self.header, self.recorded = _NO_TOTALS, {}

    def put(self, counts: Mapping[str, int]) -> None:
        """Set counts since the process began; a count never falls."""
        for name, count in counts.items():
            self.recorded[name] = max(count, self.recorded.get(name, 0))

    def grow(self, counts: Mapping[str, int]) -> None:
        """Add counts since the last call."""
        self.recorded = _sums(self.recorded, counts)

    def totals(self, phases: Sequence[str]) -> Totals:
        """Return the counts over all processes."""
        before, now = self._before, self.header
        return Totals(
            before.steps + now.steps,
            before.samples + now.samples,
            before.tokens + now.tokens,
            added(phases, [ns / 1e9 for ns in now.phases_ns], before.phases_s),
            _sums(before.recorded, self.recorded),
        )

    def shown(self, phases: Sequence[str]) -> dict[str, Any]:
        """Return the counts as fields of RankState."""
        totals = self.totals(phases)
        recorded = totals.recorded
        return {
            "steps_total": totals.steps,
            "samples_total": totals.samples,
            "tokens_total": totals.tokens,
            "phases_s": totals.phases_s,
            "durations": self.durations.histogram(),
            "lost_records": self.lost,
            "gc_s": _seconds(recorded.get("gc_ns")),
            "gc_collections_total": recorded.get("gc_collections"),
            "allocation_retries_total": recorded.get("allocation_retries"),
            "out_of_memory_errors_total": recorded.get("out_of_memory_errors"),
            "core_wait_s": _seconds(recorded.get("core_wait_ns")),
            "throttled_s": _seconds(recorded.get("throttled_ns")),
        }

    def save(self) -> SavedCounts:
        counts = tuple(self.durations.counts)
        return SavedCounts(self._before, self.recorded, self.lost, counts, self.durations.sum_s)

    def restore(self, saved: SavedCounts, names: PhaseNames) -> None:
        """Continue from ``save``. Raises ValueError if the histogram has other buckets."""
        self.durations = StepDurations(saved.counts, saved.sum_s)
        phases_s = saved.base.phases_s
        named_s = added(names.admit(phases_s), phases_s.values())
        self._before = msgspec.structs.replace(saved.base, phases_s=named_s)
        self.recorded, self.lost = dict(saved.recorded), saved.lost


def _sums(one: Mapping[str, int], other: Mapping[str, int]) -> dict[str, int]:
    return {name: one.get(name, 0) + other.get(name, 0) for name in {**one, **other}}


def added(
    names: Iterable[str], values: Iterable[float], to: Mapping[str, float] | None = None
) -> dict[str, float]:
    """Return the sums by name; a name may come more than once."""
    sums = dict(to or {})
    for name, value in zip(names, values, strict=False):
        sums[name] = sums.get(name, 0.0) + value
    return sums


def _seconds(nanoseconds: int | None) -> float | None:
    return None if nanoseconds is None else nanoseconds / 1e9


MAX_PHASES_PER_JOB = 64
OTHER = "other"


class PhaseNames:
    """The phase names of one rank, a bounded number; further names become ``other``.

    Each name is a series, and is kept for as long as the rank. ``of_job``: the names of all ranks
    of the job, shared by them.
    """

    def __init__(self, of_job: set[str]) -> None:
        self.of_job = of_job
        self._own: set[str] = set()

    def admit(self, names: Iterable[str]) -> list[str]:
        """Return each name as it is shown."""
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
