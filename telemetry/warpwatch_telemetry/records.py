"""Defines records of events, in order of time. The telemetry log is their JSON form.

Times are wall clock in seconds, durations in seconds, memory in bytes. ``owner``, ``job`` and
``run`` say together of which job a record is, as ``JobId`` has them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import Meta

from warpwatch_telemetry.jobs import JobId
from warpwatch_telemetry.metric import SeriesKey

# ``JobId(…)`` in half of its time: every record is asked for its job several times.
_new = tuple.__new__

# The largest signed word of 64 bits; no count of a rank is larger.
MAX_INTEGER = 2**63 - 1

# Checked where a record is read by its types, as the lines of a log are.
Integer = Annotated[int, Meta(ge=-MAX_INTEGER, le=MAX_INTEGER)]
Count = Annotated[int, Meta(ge=0, le=MAX_INTEGER)]
Seconds = Annotated[float, Meta(ge=0)]
Ratio = Annotated[float, Meta(ge=0, le=1)]

JobKind = Literal["train", "serve"]
# The part of a process in a serving job: a worker that computes, the scheduler, or the front end.
Role = Literal["rank", "scheduler", "frontend"]
# The work of an iteration; empty for a step of a training.
WorkClass = Literal["", "prefill", "decode", "mixed"]
# The latencies in a second of a server, fields of ``Serve``.
LATENCIES = ("first_token", "inter_token", "queue")


class _OfJob:
    """A record about one job."""

    __slots__ = ()

    if TYPE_CHECKING:
        owner: str
        job: str
        run: str

    @property
    def job_id(self) -> JobId:
        return _new(JobId, (self.owner, self.job, self.run))


class RankSeen(_OfJob, msgspec.Struct, frozen=True, gc=False, tag_field="type", tag="rank"):
    """A rank reported for the first time, or its device, places or role have become known.

    master: host and port where the ranks of a run without an id meet, which joins its nodes.
    pod, pod_uid: its Kubernetes pod, as the kubelet names it; else empty.
    parallel: its place and the size, by kind of ``state.PARALLELISM`` if known.
    kind: of the job. role: of the process in a serving job. replica: the short name of this replica
        of a server, whose live replicas have one job name; empty for a training.
    """

    time: float
    job: str
    rank: Integer
    world_size: Integer = 1
    device: str | None = None
    owner: str = ""
    run: str = ""
    master: str = ""
    pod: str = ""
    pod_uid: str = ""
    parallel: Mapping[str, tuple[int, int]] = {}
    kind: JobKind = "train"
    role: Role = "rank"
    replica: str = ""


class Step(_OfJob, msgspec.Struct, frozen=True, gc=False, tag_field="type", tag="step"):
    """One finished optimizer step of one rank. Phases are disjoint; the remainder is ``other``.

    An iteration of an inference server is a step, too. Its work is ``work_class`` (``class`` in
    JSON), the prompt tokens that it computed, the requests that got a token, and the tokens in the
    KV cache of all its requests.

    profiled: it ran under the profiler, or paid for starting it or for its export.
    """

    time: float
    job: str
    rank: Count
    step: Count
    duration_s: Seconds
    gpu_s: float | None = None
    phases_s: Mapping[str, float] = {}
    memory_allocated_bytes: Count | None = None
    samples: Count = 0
    tokens: Count = 0
    profiled: bool = False
    owner: str = ""
    run: str = ""
    work_class: WorkClass = msgspec.field(name="class", default="")
    prefill_tokens: Count = 0
    decode_requests: Count = 0
    kv_tokens: Count = 0


class Serve(_OfJob, msgspec.Struct, frozen=True, gc=False):
    """About one second of one process of a serving job. Counts are those since the record before.

    Requests, KV cache and latencies come from the engine's scheduler; a worker reports iterations.

    interval_s: the time since the record before. idle_s: of it, without a request in flight.
    running, waiting: requests now. kv_usage: share of the KV cache in use; None if unknown.
    preemptions: requests that lost their place. prefix_hit_tokens: of ``prefix_query_tokens``
        prompt tokens, those that the prefix cache had.
    prompt_tokens, generated_tokens: computed and returned.
    iterations: by class of work, their number and their seconds. comm_s: of these, waiting.
    first_token, inter_token, queue: observations by bucket of ``state.LATENCY_BOUNDS_S``, one
        more than the bounds; ``…_s`` are their sums in seconds.
    """

    time: float
    job: str
    rank: Count = 0
    interval_s: Seconds = 1.0
    idle_s: Seconds = 0.0
    running: Count = 0
    waiting: Count = 0
    kv_usage: Ratio | None = None
    preemptions: Count = 0
    prefix_hit_tokens: Count = 0
    prefix_query_tokens: Count = 0
    prompt_tokens: Count = 0
    generated_tokens: Count = 0
    iterations: Mapping[WorkClass, tuple[Count, Seconds]] = {}
    comm_s: Seconds = 0.0
    first_token: Mapping[int, Count] = {}
    first_token_s: Seconds = 0.0
    inter_token: Mapping[int, Count] = {}
    inter_token_s: Seconds = 0.0
    queue: Mapping[int, Count] = {}
    queue_s: Seconds = 0.0
    owner: str = ""
    run: str = ""

    @property
    def is_idle(self) -> bool:
        """Whether no request was in flight in all of it."""
        return self.idle_s >= self.interval_s > 0


class DeviceReading(msgspec.Struct, frozen=True, gc=False):
    """The values of one device at one time. ``index``: as the driver counts the GPUs.

    driver_load: another one after a reboot, and after the driver was loaded again; empty: unknown.
    slot: PCI address; empty: unknown.
    """

    time: float
    device: str
    metrics: Mapping[SeriesKey, float]
    up: bool = True
    reason: str = ""
    index: Count | None = None
    driver_load: str = ""
    slot: str = ""


class PortReading(DeviceReading, frozen=True, gc=False):
    """The values of a network port, ``<device>/<number>``, which no rule for GPUs applies to."""


class RankEvent(_OfJob, msgspec.Struct, frozen=True, gc=False):
    """Something that happened to a rank. Unknown values are left out of ``detail``.

    ``event`` from the shim: ``capture_*``, ``exception``, ``oom``, ``gc_pause`` (duration_s,
    generation, step), ``memory`` (allocated_bytes, reserved_bytes, peak_allocated_bytes,
    inactive_split_bytes, allocation_retries, out_of_memory_errors). From the daemon:

    stopped: alive without a heartbeat, with silent_reason. resumed.
    died: exited without an exit record; oom_kill if the kernel ended it for want of memory.
    training: no step ends, but backwards or optimizer steps go on; calls: their number so far.
    finished: the training has ended, the process lives on until it ends or trains again.
    process: /proc and its control groups now: cpu_s, io_bytes, disk_wait, anonymous_bytes,
        available_bytes, limit_bytes, core_wait_share, throttled_share, core_limit, steal_share;
        core_users: who used its cores, pid and cores each, with name, core and rank if known.
    compared: the run with earlier ones of the job: steps of a rank, step_s their median, earlier_s
        a list of theirs, phases_s and earlier_phases_s mean seconds per step by phase.
    records_lost: records that were overwritten before they were read; steps, samples and tokens
        are the rank's totals, which its ring keeps.
    """

    time: float
    job: str
    rank: int
    event: str
    detail: Mapping[str, Any] = {}
    owner: str = ""
    run: str = ""


class Clock(msgspec.Struct, frozen=True, gc=False, tag_field="type", tag="clock"):
    """Time passed and nothing arrived."""

    time: float


class End(_OfJob, msgspec.Struct, frozen=True, gc=False):
    """The rank (or, without a rank, the whole job) ended in order."""

    time: float
    job: str
    rank: int | None = None
    owner: str = ""
    run: str = ""


JobRecord = RankSeen | Step | Serve | RankEvent | End
Record = JobRecord | DeviceReading | Clock
