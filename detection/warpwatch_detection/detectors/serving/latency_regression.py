"""Finds latencies that rise although the load is the same, and the part of the server that did it.

Latencies follow from the load: the requests in flight and waiting, the KV cache in use, the tokens
of prompts. So each second is compared with earlier ones of the same load (signals/samples.py).
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
    JobStates,
    Results,
    rate_per_s,
)
from warpwatch_detection.job_steps import STEPS_AFTER_CAPTURE, CaptureWindows
from warpwatch_detection.signals.level_shift import CLOSING_SAMPLES, LevelShift, Rise, Shift
from warpwatch_detection.signals.samples import EqualWork, size
from warpwatch_telemetry.anomalies import Detected
from warpwatch_telemetry.jobs import JobId
from warpwatch_telemetry.records import End, RankEvent, Serve

Latency = Literal["inter_token", "first_token"]
# The least rise that users notice. Prompts differ in length, so first tokens vary more.
EFFECTS: dict[Latency, float] = {"inter_token": math.log(1.4), "first_token": math.log(2.0)}
# Half a minute of prompts that are longer than usual, or a burst, is not a regression.
LEAST_WINDOW = 24
# A second with fewer observations is noise.
LEAST_COUNT: dict[Latency, int] = {"inter_token": 4, "first_token": 1}
# A level that has lasted this time is the new normal.
ACCEPT_AFTER_S = 600.0
UPDATE_SAMPLES = 20
# Widths of the bins of the load.
RUNNING_WIDTH, WAITING_WIDTH, PROMPT_WIDTH = 1.2, 2.0, 1.6
KV_STEPS = 16
# Weights of a second in the usual and in the present parts.
USUAL_WEIGHT, NOW_WEIGHT = 1 / 300, 1 / 15
# A part must rise by this factor, or take this share of the latency's rise, to be the cause.
CAUSE_FACTOR = 1.1
# Older seconds of other processes are ignored.
FRESH_S = 5.0


@dataclass(slots=True)
class Parts:
    """The parts of a latency, as means over seconds. comm_share: of the iteration, for ranks."""

    iteration_s: float = 0.0
    comm_share: float = 0.0
    queue_s: float = 0.0
    preemptions: float = 0.0

    def follow(self, new: Parts, weight: float) -> None:
        for name in self.__slots__:
            mine = getattr(self, name)
            setattr(self, name, mine + weight * (getattr(new, name) - mine))


@dataclass(slots=True)
class LatencySeries:
    """One latency of one server. shown: the rise is large enough. usual_s: of the newest second."""

    work: EqualWork = field(default_factory=EqualWork)
    shifts: LevelShift = field(default_factory=LevelShift)
    rise: Rise | None = None
    shown: bool = False
    usual_s: float = 0.0

    def add(self, key: tuple[int, ...], seconds: float, rate: float) -> tuple[bool, Shift | None]:
        """Return whether the second could be compared, and the shift that it shows."""
        residual = self.work.residual(key, math.log(seconds), learns=self.rise is None)
        if residual is None:
            return False, None
        self.usual_s = seconds * math.exp(-residual)
        shift = self.shifts.add(residual, rate, LEAST_WINDOW)
        if shift is not None:
            self.work.level += shift.difference
        return True, shift


@dataclass(slots=True)
class ServerLatency:
    """engine: the newest second of the process that has the requests.

    workers: the newest second with iterations, by rank. masked_until: the end of an export.
    """

    engine: Serve | None = None
    workers: dict[int, Serve] = field(default_factory=dict)
    series: dict[str, LatencySeries] = field(default_factory=dict)
    usual: Parts | None = None
    now: Parts | None = None
    masked_until: float = 0.0

    @property
    def on(self) -> bool:
        return any(series.rise is not None for series in self.series.values())


@dataclass(slots=True)
class LatencyState(JobStates[ServerLatency]):
    captures: CaptureWindows = field(default_factory=CaptureWindows)


class LatencyRegression(Detector):
    kind = "latency_regression"
    reads = (Serve, RankEvent, End)

    def __init__(self, false_alarms_per_job_day: float = FALSE_ALARMS_PER_JOB_DAY) -> None:
        # Each of the two latencies has half.
        self._rate = rate_per_s(self.kind, false_alarms_per_job_day) / len(EFFECTS)
        self.state = LatencyState()

    def observe(self, seen: Serve | RankEvent | End) -> Results:
        if not isinstance(seen, Serve):
            self._leave(seen)
            return ()
        job = self.state.jobs.get(seen.job_id)
        if job is None:
            job = self.state.jobs[seen.job_id] = ServerLatency()
        if seen.running or seen.waiting or seen.prompt_tokens or seen.generated_tokens:
            job.engine = seen
        if seen.iterations:
            job.workers[seen.rank] = seen
        if not (seen.inter_token or seen.first_token):
            return ()
        captured = self.state.captures.runs_until(seen.job_id, seen.time) is not None
        if captured or seen.time < job.masked_until:
            return ()
        return list(self._second(job, seen))

    def forget(self, job: JobId) -> None:
        self.state.jobs.pop(job, None)
        self.state.captures.forget(job)

    def statuses(self) -> Iterable[DetectorStatus]:
        for name, job in self.state.jobs.items():
            series = job.series.get("inter_token")
            if series is None or not series.shifts.ready:
                text = f"{len(series.work.bins) if series else 0} kinds of load seen so far"
                yield DetectorStatus("learning", text, **name.fields())
                continue
            value = math.expm1(min(series.shifts.difference, 10.0))
            yield DetectorStatus(
                "found" if job.on else "fine",
                f"time between tokens {100 * value:+.1f} % against earlier, at equal load",
                **name.fields(),
                value=value,
                baseline=0.0,
                limit=math.expm1(EFFECTS["inter_token"]),
            )

    def _leave(self, seen: RankEvent | End) -> None:
        job = self.state.jobs.get(seen.job_id)
        if isinstance(seen, RankEvent) and self.state.captures.observe(seen) and job is not None:
            job.masked_until = seen.time + STEPS_AFTER_CAPTURE
        if job is not None and (isinstance(seen, End) or seen.event == "died"):
            job.workers.pop(-1 if seen.rank is None else seen.rank, None)

    def _second(self, job: ServerLatency, seen: Serve) -> Iterator[Detected | Cleared]:
        """Evaluate one second of the process that reports the latencies."""
        engine = job.engine
        if engine is None or seen.time - engine.time > FRESH_S:
            return
        key = _load(engine)
        self._parts(job, seen, engine)
        for latency in EFFECTS:
            if latency == "first_token" and engine.waiting:
                # A queue comes and goes with the load, and growing without an end has its own kind.
                continue
            count = sum(getattr(seen, latency).values())
            seconds = getattr(seen, f"{latency}_s") / count if count else 0.0
            if count >= LEAST_COUNT[latency] and seconds > 0:
                series = job.series.setdefault(latency, LatencySeries())
                compared, shift = series.add(key, seconds, self._rate * seen.interval_s)
                if compared:
                    yield from self._judge(job, series, latency, shift, seen)

    def _parts(self, job: ServerLatency, seen: Serve, engine: Serve) -> None:
        fresh = [w for w in job.workers.values() if seen.time - w.time <= FRESH_S]
        counts = [(n, s, w.comm_s) for w in fresh for n, s in w.iterations.values() if n]
        seconds = sum(s for _, s, _ in counts)
        comm_s = sum(w.comm_s for w in fresh)
        queued = sum(seen.queue.values())
        new = Parts(
            seconds / sum(n for n, _, _ in counts) if counts else 0.0,
            comm_s / seconds if seconds else 0.0,
            seen.queue_s / queued if queued else 0.0,
            engine.preemptions / engine.interval_s if engine.interval_s else 0.0,
        )
        if job.usual is None or job.now is None:
            job.usual, job.now = new, Parts(*(getattr(new, name) for name in Parts.__slots__))
            return
        job.now.follow(new, NOW_WEIGHT)
        if not job.on:
            job.usual.follow(new, USUAL_WEIGHT)

    def _judge(
        self, job: ServerLatency, series: LatencySeries, latency: Latency, shift: Shift | None,
        seen: Serve,
    ) -> Iterator[Detected | Cleared]:  # fmt: skip
        rise = series.rise
        if rise is None:
            # A window that the rise has only reached in part shows less of it.
            if shift is not None and shift.difference > 0:
                series.rise, series.shown = Rise(seen.time, 0, shift.before, 0.0), False
            return
        rise.samples += 1
        if rise.samples % UPDATE_SAMPLES:
            return
        level = series.shifts.recent(CLOSING_SAMPLES)
        risen = level - rise.baseline
        over = rise.is_over(level) if series.shown else risen < EFFECTS[latency]
        if over or rise.is_accepted(seen.time, ACCEPT_AFTER_S):
            shown, series.rise = series.shown, None
            if shown and not job.on:
                yield Cleared(seen.time, seen.job_id)
            return
        series.shown, rise.size = True, max(rise.size, risen)
        yield self._found(job, series, latency, seen)

    def _found(
        self, job: ServerLatency, series: LatencySeries, latency: Latency, seen: Serve
    ) -> Detected:
        rise = series.rise
        assert rise is not None
        baseline_s = series.usual_s * math.exp(rise.baseline)
        value_s = baseline_s * math.exp(rise.size)
        what = "time between tokens" if latency == "inter_token" else "time to the first token"
        return Detected(
            time=seen.time,
            severity="warning",
            **seen.job_id.fields(),
            value=value_s,
            baseline=baseline_s,
            summary=f"the {what} is {100 * math.expm1(rise.size):.0f} % longer at equal load: "
            f"{value_s:.3g} s instead of {baseline_s:.3g} s; {_cause(job, value_s - baseline_s)}",
        )


def _load(engine: Serve) -> tuple[int, ...]:
    return (
        size(engine.running, RUNNING_WIDTH),
        size(engine.waiting, WAITING_WIDTH),
        round(KV_STEPS * (engine.kv_usage or 0.0)),
        size(engine.prompt_tokens, PROMPT_WIDTH),
    )


def _cause(job: ServerLatency, risen_s: float) -> str:
    """Return the part of the server that rose with the latency, in a clause."""
    usual, now = job.usual, job.now
    if usual is None or now is None:
        return "the cause is unknown"
    if now.preemptions > max(CAUSE_FACTOR * usual.preemptions, 0.2):
        return f"cause: KV cache, {now.preemptions:.1f} requests per second lose their place"
    if now.comm_share > max(CAUSE_FACTOR * usual.comm_share, usual.comm_share + 0.05):
        return (
            f"cause: ranks, they wait for each other {now.comm_share:.0%} of an iteration instead "
            f"of {usual.comm_share:.0%}"
        )
    if now.iteration_s > CAUSE_FACTOR * usual.iteration_s:
        return (
            f"cause: work, an iteration takes {1e3 * now.iteration_s:.3g} ms instead of "
            f"{1e3 * usual.iteration_s:.3g} ms"
        )
    if now.queue_s - usual.queue_s > risen_s / 2:
        return f"cause: queue, {now.queue_s:.3g} s instead of {usual.queue_s:.3g} s"
    return "cause: front end, iterations and queue are as before"
