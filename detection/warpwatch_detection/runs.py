"""The figures of runs: sums over a run's steps, and comparisons with earlier runs."""

from __future__ import annotations

import math
import statistics
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import nlargest
from typing import Any

from warpwatch_detection.detector import WARMUP_STEPS
from warpwatch_detection.detectors.run_regression import MIN_STEPS
from warpwatch_detection.signals.samples import LEARNED, MAX_BINS, work_bin
from warpwatch_telemetry.jobs import JobId, RunSummary
from warpwatch_telemetry.records import LATENCIES, Serve, Step

# Phases that are not part of a step's duration.
PAUSES = ("checkpoint", "eval")
OTHER = "other"
# A summary has the kinds of work with the most iterations.
MAX_WORKS = 256
# No count of a summary is larger, and no sum; no logarithm of a ratio is larger.
_MOST, _MAX_LOG = 2**48, 20.0
# By name a count and a sum.
Sums = dict[str, tuple[int, float]]


class RunFigures:
    """The figures of a run. before: summaries of its earlier steps, or of its nodes."""

    def __init__(self, *before: RunSummary) -> None:
        self.anomalies: Counter[str] = Counter()
        self.energy_before_j = 0.0
        # When its last rank ended, 0 while none has.
        self.end_time = 0.0
        self._histogram = StepHistogram()
        self._seconds = 0.0
        self._tokens = self._samples = 0.0
        self._phases_s: dict[str, float] = {}
        # Counts and sums: seconds by latency, logarithms of seconds by kind of work.
        self._latencies: Sums = {}
        self._works: Sums = {}
        # The ignored first steps of each rank.
        self._warmup: Counter[int] = Counter()
        self._known_until = 0.0
        self.before = before[0] if before else None
        for summary in before:
            self._continue(summary)

    def _continue(self, before: RunSummary) -> None:
        count = self._histogram.put(before.step_counts)
        self._seconds += sum(before.phases_s.values()) * count
        for name, mean_s in before.phases_s.items():
            self._phases_s[name] = self._phases_s.get(name, 0.0) + mean_s * count
        self._phases_s.pop(OTHER, None)
        self._tokens += (before.tokens_per_step or 0.0) * count
        self._samples += (before.samples_per_step or 0.0) * count
        self.anomalies.update(before.anomalies)
        self.energy_before_j += before.energy_j or 0.0
        self._known_until = max(self._known_until, before.time)
        for latency, sums in before.latencies.items():
            _grow(self._latencies, latency, *sums)
        for work, sums in before.works.items():
            _grow(self._works, work, *sums)

    @property
    def judged_steps(self) -> int:
        return self._histogram.count

    def add(self, step: Step) -> None:
        if step.profiled or step.time <= self._known_until:
            return
        if self.before is None and self._warmup[step.rank] < WARMUP_STEPS:
            self._warmup[step.rank] += 1
            return
        pauses_s = sum(step.phases_s.get(name, 0.0) for name in PAUSES)
        duration_s = max(0.0, step.duration_s - pauses_s)
        self._histogram.add(duration_s)
        self._seconds += duration_s
        self._tokens += step.tokens
        self._samples += step.samples
        if step.work_class:
            work = "/".join(map(str, work_bin(step)))
            _grow(self._works, work, 1, math.log(max(duration_s, LEAST_S)))
        for name, seconds in step.phases_s.items():
            if name not in PAUSES:
                self._phases_s[name] = self._phases_s.get(name, 0.0) + seconds

    def add_second(self, second: Serve) -> None:
        if second.time > self._known_until:
            for name in LATENCIES:
                if counts := getattr(second, name):
                    _grow(self._latencies, name, sum(counts.values()), getattr(second, f"{name}_s"))

    def note_end(self, time: float) -> None:
        self.end_time = max(self.end_time, time)

    def fields(self, ranks: int) -> dict[str, Any]:
        """Return the fields of RunSummary that come from steps; ``ranks``: the number of ranks."""
        count, seconds = self._histogram.count, self._seconds
        if not count:
            return {"anomalies": dict(self.anomalies)}
        phases_s = {name: total / count for name, total in self._phases_s.items()}
        other_s = seconds / count - sum(phases_s.values())
        found = {
            "judged_steps": count,
            "step_p50_s": self._histogram.percentile(0.5),
            "step_p95_s": self._histogram.percentile(0.95),
            "phases_s": {**phases_s, OTHER: max(0.0, other_s)},
            "anomalies": dict(self.anomalies),
            "step_counts": self._histogram.counts,
            "latencies": dict(self._latencies),
            "works": dict(nlargest(MAX_WORKS, self._works.items(), key=lambda work: work[1])),
        }
        for name, total in (("tokens", self._tokens), ("samples", self._samples)):
            if total and seconds > 0:
                found[f"{name}_per_step"] = total / count
                found[f"{name}_per_s"] = ranks * total / seconds
        return found


def _grow(sums: Sums, name: str, count: int, amount: float) -> None:
    """Add to a count and a sum; impossible ones, and more names than MAX_BINS, are ignored."""
    before, total = sums.get(name, (0, 0.0))
    if 0 < count < _MOST and abs(amount) < _MOST and (before or len(sums) < MAX_BINS):
        sums[name] = before + count, total + amount


# The ratio of a bin's edges: a percentile is right to 1 %.
GROWTH = 1.02
LEAST_S = 1e-4
# Up to a day.
BINS = math.ceil(math.log(86400.0 / LEAST_S) / math.log(GROWTH)) + 1
_SCALE = 1 / math.log(GROWTH)


class StepHistogram:
    """The durations of steps in bins of equal ratio, as in DDSketch (Masson, Rim and Lee 2019).

    A percentile has the same relative error for any distribution. It takes 8 kB.
    """

    def __init__(self) -> None:
        self._bins = array("Q", bytes(8 * BINS))
        self.count = 0

    def put(self, counts: Mapping[int, int]) -> int:
        """Add the counts of another histogram; return their number."""
        before = self.count
        for number, count in counts.items():
            if 0 <= number < BINS and 0 < count < _MOST:
                self._bins[number] += count
                self.count += count
        return self.count - before

    def add(self, duration_s: float) -> None:
        number = int(math.log(max(duration_s, LEAST_S) / LEAST_S) * _SCALE)
        self._bins[min(number, BINS - 1)] += 1
        self.count += 1

    @property
    def counts(self) -> dict[int, int]:
        """The number of steps by bin; a bin begins at LEAST_S · GROWTH ** bin."""
        return {number: count for number, count in enumerate(self._bins) if count}

    def percentile(self, share: float) -> float | None:
        """Return the percentile ``share`` (0 to 1) in seconds; None if there are no steps."""
        left = share * self.count
        for number, count in enumerate(self._bins):
            if count and left <= count:
                return LEAST_S * math.exp((number + 0.5) / _SCALE)
            left -= count
        return None


# Tokens per step that differ by less count as equal.
SAME_WORK = 0.01


@dataclass(frozen=True, slots=True)
class RunPhaseChange:
    """The mean seconds of a phase per step, 0 if a run lacks the phase; or of a latency."""

    phase: str
    before_s: float
    after_s: float

    @property
    def grown_s(self) -> float:
        return self.after_s - self.before_s


@dataclass(frozen=True, slots=True)
class RunComparison:
    """The comparison of a run with one before it.

    step_ratio: the ratio of the medians, for a server that of iterations with the same work; None
    if it is unknown. phases: the most changed first. grown: the phase that grew most, None if none
    grew. latencies: those that both runs have. differs: the differences of kind, a sentence each.
    """

    before: RunSummary
    after: RunSummary
    step_ratio: float | None
    phases: tuple[RunPhaseChange, ...]
    grown: str | None
    latencies: tuple[RunPhaseChange, ...]
    differs: tuple[str, ...]


def compare(before: RunSummary, after: RunSummary) -> RunComparison:
    ratio = None
    if before.is_server and after.is_server:
        ratio = ratio_at_equal_work(before, after)
    elif before.step_p50_s and after.step_p50_s:
        ratio = after.step_p50_s / before.step_p50_s
    one, other = before.phases_s, after.phases_s
    names = sorted(one.keys() | other.keys())
    changes = [RunPhaseChange(name, one.get(name, 0.0), other.get(name, 0.0)) for name in names]
    phases = tuple(sorted(changes, key=lambda change: -abs(change.grown_s)))
    grown = max(phases, key=lambda change: change.grown_s, default=None)
    name = grown.phase if grown is not None and grown.grown_s > 0 else None
    latencies = tuple(
        RunPhaseChange(name, *(run.latencies[name][1] / run.latencies[name][0] for run in both))
        for both in [(before, after)]
        for name in LATENCIES
        if name in before.latencies and name in after.latencies
    )
    differs = tuple(differences(before, after))
    return RunComparison(before, after, ratio, phases, name, latencies, differs)


def ratio_at_equal_work(before: RunSummary, after: RunSummary) -> float | None:
    """Return the geometric mean ratio of iterations with the same work; None with few of them."""
    weight, logs = 0, 0.0
    for work, (count, total) in after.works.items():
        usual, usual_total = before.works.get(work, (0, 0.0))
        common = min(count, usual)
        if common >= LEARNED:
            weight += common
            logs += common * (total / count - usual_total / usual)
    return math.exp(min(logs / weight, _MAX_LOG)) if weight >= MIN_STEPS else None


def differences(before: RunSummary, after: RunSummary) -> Iterator[str]:
    """Yield the reasons why steps of these runs may differ, a sentence each."""
    for name in ("world_size", "gpu_model", "step_clock"):
        one, other = getattr(before, name), getattr(after, name)
        if one != other:
            yield f"{name}: {one} and {other}"
    if before.is_server and after.is_server:
        # Their iterations are compared at equal work.
        return
    for name in ("tokens_per_step", "samples_per_step"):
        one, other = getattr(before, name), getattr(after, name)
        if one is None and other is None:
            continue
        if one is None or other is None or abs(other / one - 1) > SAME_WORK:
            yield f"{name}: {_number(one)} and {_number(other)}"


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:g}"


# A run is compared with up to this many earlier ones.
MAX_EARLIER = 5
REGRESSED = "run_regression"
# After this many regressed runs in a row the new level is normal.
ACCEPTED_AFTER = 3


def earlier(run: RunSummary, runs: Iterable[RunSummary]) -> list[RunSummary]:
    """Return the last good runs of the same kind that have ended, newest first.

    ACCEPTED_AFTER regressed runs in a row are good, and what was before them does not count.
    """
    good: list[RunSummary] = []
    regressed: list[RunSummary] = []
    for other in sorted(runs, key=lambda other: -other.first_time):
        if not _is_alike(other, run):
            continue
        if REGRESSED not in other.anomalies:
            good.append(other)
            regressed.clear()
            continue
        regressed.append(other)
        if len(regressed) == ACCEPTED_AFTER:
            good += regressed
            break
    return good[:MAX_EARLIER]


def compared(run: RunSummary, earlier_runs: Sequence[RunSummary]) -> dict[str, Any]:
    """Return the detail of the event ``compared``."""
    names = {name for other in earlier_runs for name in other.phases_s}
    return {
        "steps": _steps(run),
        "step_s": run.step_p50_s,
        "earlier_s": [other.step_p50_s for other in earlier_runs],
        "phases_s": dict(run.phases_s),
        "earlier_phases_s": {
            name: statistics.median(other.phases_s.get(name, 0.0) for other in earlier_runs)
            for name in sorted(names)
        },
    }


def has_enough(run: RunSummary) -> bool:
    """Return whether the median of the steps is stable; that of a server follows its load."""
    return not run.is_server and _steps(run) >= MIN_STEPS


def _steps(run: RunSummary) -> int:
    """Return the evaluated steps per rank."""
    return run.judged_steps // max(1, len(run.ranks))


def name_of(job: JobId) -> tuple[str, str]:
    """Return owner and name of a run's job: a second live run is called ``name#<6 digits>``."""
    return job.owner, job.name.partition("#")[0]


def _is_alike(other: RunSummary, run: RunSummary) -> bool:
    """Return whether ``other`` is an ended run of the same job and kind."""
    is_other = name_of(other.job_id) == name_of(run.job_id) and other.job_id != run.job_id
    ended = other.end_time is not None and other.first_time < run.first_time
    return is_other and ended and has_enough(other) and not any(differences(other, run))
