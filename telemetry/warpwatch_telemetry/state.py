"""Defines the state at one moment, immutable: exporters and the page read it without a lock."""

from __future__ import annotations

import bisect
import math
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from warpwatch_telemetry.anomalies import Anomaly, AnomalyContext
from warpwatch_telemetry.captures import Capture, Decision
from warpwatch_telemetry.jobs import JobId
from warpwatch_telemetry.records import JobKind, Serve, Step
from warpwatch_telemetry.samples import Attribution, DeviceSample, HostSample, SourceHealth

# Upper bounds in seconds of warpwatch_step_duration_seconds; a last bucket counts the rest.
COARSE_STEP_BOUNDS_S = (
    0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0,
)  # fmt: skip
# The counted bounds: between 50 ms and 10 s each is at most 1.25 times the one before.
STEP_DURATION_BOUNDS_S = (
    0.005, 0.01, 0.025, 0.05, 0.06, 0.072, 0.085, 0.1, 0.125, 0.15, 0.18, 0.21, 0.25, 0.3, 0.35,
    0.42, 0.5, 0.6, 0.72, 0.85, 1.0, 1.25, 1.5, 1.8, 2.1, 2.5, 3.0, 3.5, 4.2, 5.0, 6.0, 7.2, 8.5,
    10.0, 30.0, 60.0, 120.0,
)  # fmt: skip


def _latency_bounds() -> tuple[float, ...]:
    """Return bounds that show a change of 10 % between 1 and 100 ms, and of half above."""
    bounds = [0.001]
    while bounds[-1] < 100.0:
        bounds.append(float(f"{bounds[-1] * (1.1 if bounds[-1] < 0.1 else 1.5):.3g}"))
    return tuple(bounds)


# Upper bounds in seconds of time to first token, inter-token time and queue time.
LATENCY_BOUNDS_S = _latency_bounds()

# A rank's job, name, owner and replica, as its series have them.
RankKey = tuple[str, str, str, str]


@dataclass(frozen=True, slots=True)
class Histogram:
    """A histogram: counts per bucket, not cumulative, one more than bounds; ``sum`` in seconds."""

    counts: tuple[int, ...] = (0,) * (len(STEP_DURATION_BOUNDS_S) + 1)
    sum: float = 0.0


# Kinds of parallelism, in the order of rank_info.
PARALLELISM = {"data": "DP", "tensor": "TP", "pipeline": "PP", "expert": "EP", "context": "CP"}


@dataclass(frozen=True, slots=True)
class ServeState:
    """A process of an inference server.

    role: rank (it computes), scheduler or frontend. replica: the short name of this replica.
    server: the name and version of the program. note: what its hooks cannot report, and why.
    idle: whether no request was in flight in its last second. running, waiting: requests then.
    kv_usage: used share of the KV cache. Unknown values are None, also those of an ended process.
    counts: prompt_tokens, generated_tokens, preemptions, prefix_hit_tokens, prefix_query_tokens.
    idle_s: without a request in flight. iterations: by class of work, over the bounds
        LATENCY_BOUNDS_S, as first_token, inter_token and queue in ``latencies`` are.
    """

    role: str = "rank"
    replica: str = ""
    server: str = ""
    note: str = ""
    idle: bool | None = None
    running: int | None = None
    waiting: int | None = None
    kv_usage: float | None = None
    counts: Mapping[str, int] = field(default_factory=dict)
    idle_s: float = 0.0
    iterations: Mapping[str, Histogram] = field(default_factory=dict)
    latencies: Mapping[str, Histogram] = field(default_factory=dict)

    @staticmethod
    def now(second: Serve | None, requests_known: bool) -> dict[str, Any]:
        """Return the fields that the newest second of a live process has."""
        if second is None:
            return {}
        running, waiting = (second.running, second.waiting) if requests_known else (None, None)
        requests = {"running": running, "waiting": waiting, "kv_usage": second.kv_usage}
        return {"idle": second.is_idle, **requests}


@dataclass(frozen=True, slots=True)
class RankState:
    """One rank, from its ring. Its own values are claims; ``owner`` is a fact.

    name: the rank's label value. owner, job, run: its job, as in JobId.
    status: running, stopped (no heartbeat), exited (cleanly) or died.
    step: the newest finished step; step_begun: the one now begun on the CPU.
    silent_reason: of a stopped rank: "stopped" (from outside), "holds the GIL" (a C call, so that
        no other thread runs) or "unknown".
    seen_time: when the daemon first saw it; first_time: from the ring.
    step_clock: the end of a step: step(), a framework's name, optimizer, dataloader, backward or
        other.
    calls_without_step: backwards and optimizer steps without the end of a step; 0 if steps end or
        may still come. steps_elsewhere: of other threads that trained at the same time, which are
        not counted; two significant digits.
    client: the version of its shim.
    parallel: the rank's place and the size, by kind of PARALLELISM if known.
    flops_per_token, flops_per_sample: of the model's training, from the user, else 0.
    parameters: trained by its optimizers, 0 if unknown. precision: from the user, else of
        parameters with 16 bits.
    recent_s: durations of the newest steps, oldest first, for the page's charts.
    steps_per_s, samples_per_s, tokens_per_s: in the newest steps, while it steps. comm_s: per step
        of these in phase comm, which is mostly waiting for other ranks.
    serve: a process of an inference server, None in a training; its steps are iterations.
    gc_s: in Python's garbage collector. core_wait_s: in which threads were ready without a core.
        throttled_s: in which the CPU limit of its control group held cores back. energy_j: its
        share of its device's energy. The last three are counted while this daemon ran.

    Unknown values are None, also current values of an ended rank.
    """

    job: str
    rank: int
    name: str
    pid: int
    host: str
    local_rank: int = 0
    world_size: int = 1
    device: str | None = None
    pod_uid: str | None = None
    framework: str = ""
    step_clock: str = ""
    client: str = ""
    calls_without_step: int = 0
    steps_elsewhere: int = 0
    parallel: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    flops_per_token: float = 0.0
    flops_per_sample: float = 0.0
    parameters: int = 0
    precision: str = ""
    status: str = "running"
    silent_reason: str | None = None
    first_time: float = 0.0
    seen_time: float = 0.0
    last_step_time: float | None = None
    step: int | None = None
    step_begun: int | None = None
    steps_total: int = 0
    samples_total: int = 0
    tokens_total: int = 0
    lost_records: int = 0
    phases_s: Mapping[str, float] = field(default_factory=dict)
    durations: Histogram = field(default_factory=Histogram)
    recent_s: tuple[float, ...] = ()
    steps_per_s: float | None = None
    samples_per_s: float | None = None
    tokens_per_s: float | None = None
    comm_s: float | None = None
    gc_s: float | None = None
    gc_collections_total: int | None = None
    memory_allocated_bytes: int | None = None
    memory_reserved_bytes: int | None = None
    memory_peak_allocated_bytes: int | None = None
    memory_inactive_split_bytes: int | None = None
    allocation_retries_total: int | None = None
    out_of_memory_errors_total: int | None = None
    core_wait_s: float | None = None
    throttled_s: float | None = None
    energy_j: float | None = None
    owner: str = ""
    run: str = ""
    serve: ServeState | None = None

    @property
    def job_id(self) -> JobId:
        return JobId(self.owner, self.job, self.run)

    @property
    def key(self) -> RankKey:
        return self.job, self.name, self.owner, self.serve.replica if self.serve else ""

    @property
    def computes(self) -> bool:
        """Whether it has steps or iterations: not a server's scheduler or front end."""
        return self.serve is None or self.serve.role == "rank"


@dataclass(frozen=True, slots=True)
class JobState:
    """A training run: the ranks of it that this daemon sees, of ``world_size``.

    Or the processes of one replica of an inference server, whose name is ``replica``.
    model_flops_ratio: MFU by method: ``user``, ``shapes`` or ``parameters`` (docs/shim.md).
    memory_ratio: the largest share of its GPU's memory that tensors of a rank took.
    tokens_per_joule: of its ranks' devices, while this daemon counted both.
    """

    name: str
    world_size: int
    ranks: tuple[str, ...]
    energy_j: float | None = None
    model_flops_ratio: Mapping[str, float] = field(default_factory=dict)
    owner: str = ""
    run: str = ""
    tokens_per_joule: float | None = None
    memory_ratio: float | None = None
    kind: JobKind = "train"
    replica: str = ""

    @property
    def job_id(self) -> JobId:
        return JobId(self.owner, self.name, self.run)


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """Whether a detector is blind in a job; ``text`` explains it."""

    kind: str
    job: str
    owner: str
    blind: bool
    text: str


@dataclass(frozen=True, slots=True)
class State:
    """hostname: the node's name. public_url: of its page; empty where that is not configured.

    decisions: one an anomaly at most.
    contexts: by the anomaly's id, of those that are active and the newest that ended.
    """

    time: float
    version: str
    hostname: str
    devices: tuple[DeviceSample, ...] = ()
    host: HostSample | None = None
    sources: tuple[SourceHealth, ...] = ()
    ranks: tuple[RankState, ...] = ()
    jobs: tuple[JobState, ...] = ()
    anomalies: tuple[Anomaly, ...] = ()
    contexts: Mapping[str, AnomalyContext] = field(default_factory=dict)
    captures: tuple[Capture, ...] = ()
    decisions: tuple[Decision, ...] = ()
    sensitivities: tuple[Sensitivity, ...] = ()
    attributions: tuple[Attribution, ...] = ()
    public_url: str = ""


RECENT_STEPS = 120
# The throughput is that of these newest steps, so that it follows.
THROUGHPUT_STEPS = 20
# A fleet gets steps up to ten seconds late.
PACE_KEPT_S = 15.0


class StepDurations:
    """A histogram that grows step by step."""

    def __init__(
        self,
        counts: Sequence[int] | None = None,
        sum_s: float = 0.0,
        bounds: Sequence[float] = STEP_DURATION_BOUNDS_S,
    ) -> None:
        """Continue from saved ``counts``. Raises ValueError if they are of other buckets."""
        self._bounds = bounds
        buckets = len(bounds) + 1
        self.counts = [0] * buckets if counts is None else list(counts)
        self.sum_s = sum_s
        if len(self.counts) != buckets:
            raise ValueError("saved with other buckets")

    def add(self, duration_s: float) -> None:
        self.counts[bisect.bisect_left(self._bounds, duration_s)] += 1
        self.sum_s += duration_s

    def histogram(self) -> Histogram:
        return Histogram(tuple(self.counts), self.sum_s)


class RecentSteps:
    """Iterates over the durations in seconds, oldest first; any thread may do so meanwhile.

    Both arrays have their full size from the start. The memory of a rank does not grow with its
    steps, and a fleet of thousands of ranks does not fragment it.
    """

    def __init__(self) -> None:
        self._count = 0
        self._time = float("-inf")
        self._durations_s = array("d", bytes(8 * RECENT_STEPS))
        # Per step: seconds, samples, tokens and seconds in phase comm, NaN if unknown.
        self._newest = array("d", bytes(4 * 8 * THROUGHPUT_STEPS))

    def add(self, step: Step) -> None:
        count, comm_s = self._count, step.phases_s.get("comm", math.nan)
        self._durations_s[count % RECENT_STEPS] = step.duration_s
        at = 4 * (count % THROUGHPUT_STEPS)
        values = (step.duration_s, step.samples, step.tokens, comm_s)
        self._newest[at : at + 4] = array("d", values)
        self._time = step.time
        self._count = count + 1

    def __len__(self) -> int:
        return min(self._count, RECENT_STEPS)

    def __iter__(self) -> Iterator[float]:
        count, durations_s = self._count, self._durations_s[:]
        if count < RECENT_STEPS:
            return iter(durations_s[:count])
        oldest = count % RECENT_STEPS
        return iter(durations_s[oldest:] + durations_s[:oldest])

    def pace(self, now: float) -> dict[str, Any]:
        """Return the known ones of steps, samples, tokens per second, and comm_s per step.

        There are none if the last step is longer ago than the newest steps took together.
        """
        newest = self._newest[: 4 * self._count]
        taken_s, samples, tokens = (sum(newest[column::4]) for column in range(3))
        if now - self._time > max(taken_s, PACE_KEPT_S):
            return {}
        waits_s = [wait_s for wait_s in newest[3::4] if not math.isnan(wait_s)]
        counts = {"steps": len(newest) // 4, "samples": samples, "tokens": tokens}
        found = {f"{what}_per_s": n / taken_s for what, n in counts.items() if n and taken_s}
        return found | ({"comm_s": sum(waits_s) / len(waits_s)} if waits_s else {})
