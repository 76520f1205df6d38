"""Finds latencies that rise although the iterations of the engine do not explain it.

A latency follows from the iterations and the queue that a request waits for, and these from the
load. Iterations that take longer for their work are step_regression or straggler, and a queue that
does not end is queue_growth. So both latencies are compared with the iterations of the same
seconds, and the queue does not count: a load of any kind cancels. What is left is the front end,
and requests that lose their place in the KV cache.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from warpwatch_detection.detector import (
    FALSE_ALARMS_PER_JOB_DAY,
    Cleared,
    Detector,
    DetectorStatus,
    Results,
    Unjudged,
    job_found,
    job_status,
    rate_per_s,
)
from warpwatch_detection.job_steps import STEPS_AFTER_CAPTURE, CaptureWindows
from warpwatch_detection.signals.level_shift import LevelShift, Rise, Shift
from warpwatch_telemetry.anomalies import Detected
from warpwatch_telemetry.jobs import JobId
from warpwatch_telemetry.records import LATENCIES, RankEvent, Serve

Latency = Literal["inter_token", "first_token"]
# The least rise that users notice. Prompts differ in length, so first tokens vary more.
EFFECTS: dict[Latency, float] = {"inter_token": math.log(1.4), "first_token": math.log(2.0)}
WORDS: dict[Latency, str] = {
    "inter_token": "time between tokens",
    "first_token": "time to the first token",
}
# Half a minute of prompts that are longer than usual, or a burst, is not a regression.
LEAST_WINDOW = 24
# Fewer observations, or iterations, are noise.
LEAST_COUNT = 2.0
# The part of the sums that a second keeps: front end and worker begin their seconds at other times.
KEPT = 0.8
# Preemptions per second that explain a latency.
MIN_PREEMPTIONS = 0.2


@dataclass(slots=True)
class Mean:
    """The mean over the last seconds, which fade."""

    count: float = 0.0
    seconds: float = 0.0

    @property
    def value(self) -> float:
        return self.seconds / self.count if self.count else 0.0

    def add(self, count: float, seconds: float) -> None:
        self.count += count
        self.seconds += seconds

    def fade(self) -> None:
        self.count *= KEPT
        self.seconds *= KEPT


@dataclass(slots=True)
class RecentTimes:
    """Means of latencies, queue, iterations that decode, and iterations with prompts, by name.

    ``preempted`` counts requests that lost their place, in seconds with requests.
    """

    means: dict[str, Mean] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Mean:
        return self.means.setdefault(name, Mean())

    def add(self, seen: Serve) -> None:
        for name in LATENCIES:
            self[name].add(sum(getattr(seen, name).values()), getattr(seen, f"{name}_s"))
        for kind, times in seen.iterations.items():
            if kind != "prefill":
                self["decoding"].add(*times)
            if kind != "decode":
                self["computing"].add(*times)
        if seen.running or seen.waiting:
            self["preempted"].add(seen.preemptions, seen.interval_s)

    def fade(self) -> None:
        for mean in self.means.values():
            mean.fade()

    def ratio(self, latency: Latency) -> float | None:
        """Return a latency without the queue over its iterations, or None if too little is known.

        A prompt longer than a chunk has several iterations, counted by those per first token.
        """
        is_first = latency == "first_token"
        mean, iterations = self[latency], self["computing" if is_first else "decoding"]
        if min(mean.count, iterations.count) < LEAST_COUNT or not iterations.seconds:
            return None
        chunks = max(1.0, iterations.count / mean.count) if is_first else 1.0
        queue_s = self["queue"].value if is_first else 0.0
        ratio = (mean.value - queue_s) / (chunks * iterations.value)
        return ratio if 0 < ratio < math.inf else None


@dataclass(slots=True)
class LatencySeries:
    """One latency of one server, as the logarithm of its ratio. shown: the rise is large enough."""

    shifts: LevelShift = field(default_factory=LevelShift)
    rise: Rise | None = None
    shown: bool = False


@dataclass(slots=True)
class ServerLatency:
    """The latencies of one server. masked_until: the end of an export."""

    recent: RecentTimes = field(default_factory=RecentTimes)
    series: dict[str, LatencySeries] = field(default_factory=dict)
    masked_until: float = 0.0
    unjudged: Unjudged = field(default_factory=Unjudged)

    @property
    def on(self) -> bool:
        return any(series.shown for series in self.series.values())


@dataclass(slots=True)
class LatencyState:
    jobs: dict[JobId, ServerLatency] = field(default_factory=dict)
    captures: CaptureWindows = field(default_factory=CaptureWindows)


class LatencyRegression(Detector):
    kind = "latency_regression"
    reads = (Serve, RankEvent)

    def __init__(self, false_alarms_per_job_day: float = FALSE_ALARMS_PER_JOB_DAY) -> None:
        # Each of the two latencies has half.
        self._rate = rate_per_s(self.kind, false_alarms_per_job_day) / len(EFFECTS)
        self.state = LatencyState()

    def observe(self, seen: Serve | RankEvent) -> Results:
        job = self.state.jobs.get(seen.job_id)
        if not isinstance(seen, Serve):
            if self.state.captures.observe(seen) and job is not None:
                job.masked_until = seen.time + STEPS_AFTER_CAPTURE
            return ()
        if job is None:
            job = self.state.jobs[seen.job_id] = ServerLatency()
        job.recent.add(seen)
        if not (seen.inter_token or seen.first_token):
            return self._end_stale(job, seen)
        job.unjudged.end()
        captured = self.state.captures.runs_until(seen.job_id, seen.time) is not None
        results = [] if captured or seen.time < job.masked_until else self._second(job, seen)
        job.recent.fade()
        return results

    def forget(self, job: JobId) -> None:
        self.state.jobs.pop(job, None)
        self.state.captures.forget(job)

    def statuses(self) -> Iterable[DetectorStatus]:
        for name, job in self.state.jobs.items():
            shown = (one for one in EFFECTS if one in job.series and job.series[one].shown)
            latency: Latency = next(shown, "inter_token")
            series = job.series.get(latency)
            if series is None or not series.shifts.ready:
                yield job_status(name, False, "its noise is not known yet", learns=True)
                continue
            rise = series.rise if series.shown else None
            value = math.expm1(min(rise.size if rise else series.shifts.difference, 10.0))
            text = f"{WORDS[latency]} {100 * value:+.1f} % against earlier, for its iterations"
            limit = math.expm1(EFFECTS[latency])
            yield job_status(name, job.on, text, value, limit, baseline=0.0)

    def _end_stale(self, job: ServerLatency, seen: Serve) -> Results:
        """End a fault of a server that has been without load."""
        if not job.on or not job.unjudged.is_stale(seen.time):
            return ()
        self.state.jobs[seen.job_id] = ServerLatency()
        return (Cleared(seen.time, seen.job_id),)

    def _second(self, job: ServerLatency, seen: Serve) -> list[Detected | Cleared]:
        """Evaluate one second of the process that reports the latencies."""
        results: list[Detected | Cleared] = []
        for latency in EFFECTS:
            ratio = job.recent.ratio(latency) if getattr(seen, latency) else None
            if ratio is not None:
                series = job.series.setdefault(latency, LatencySeries())
                rate = self._rate * seen.interval_s
                shift = series.shifts.add(math.log(ratio), rate, LEAST_WINDOW)
                results += self._judge(job, series, latency, shift, seen)
        return results

    def _judge(
        self, job: ServerLatency, series: LatencySeries, latency: Latency, shift: Shift | None,
        seen: Serve,
    ) -> Iterator[Detected | Cleared]:  # fmt: skip
        rise = series.rise
        if rise is None:
            # A window that the rise has only reached in part shows less of it.
            if shift is not None and shift.difference > 0:
                series.rise = Rise(seen.time, 0, shift.before, 0.0)
            return
        level = rise.present(series.shifts)
        if level is None:
            return
        risen = level - rise.baseline
        over = rise.is_over(level) if series.shown else risen < EFFECTS[latency]
        if over or rise.is_accepted(seen.time):
            shown, series.rise, series.shown = series.shown, None, False
            if shown and not job.on:
                yield Cleared(seen.time, seen.job_id)
            return
        series.shown, rise.size = True, max(rise.size, risen)
        yield _found(job, rise, latency, seen)


def _found(job: ServerLatency, rise: Rise, latency: Latency, seen: Serve) -> Detected:
    value_s, preempted = job.recent[latency].value, job.recent["preempted"]
    baseline_s = value_s * math.exp(-rise.size)
    thrashes = preempted.count > MIN_PREEMPTIONS * preempted.seconds
    cause = "the KV cache, since requests lose their place and are computed again"
    if not thrashes:
        cause = "the front end, since work, ranks, queue and KV cache do not explain it"
    text = (
        f"the {WORDS[latency]} is {100 * math.expm1(rise.size):.0f} % longer than the iterations "
        f"explain: {value_s:.3g} s instead of {baseline_s:.3g} s; cause: {cause}"
    )
    rank = None if thrashes else seen.rank
    return job_found(seen.job_id, seen.time, text, value_s, baseline_s, rank=rank)
