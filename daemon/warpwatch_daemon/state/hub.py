"""Holds the current state: sources and parts of the daemon publish to it, others read it.

The samples of several sources of a device become one: the order of DEVICE_PRECEDENCE decides for
each metric. Jobs get their energy and model FLOPs utilization (MFU).
"""

from __future__ import annotations

import math
import socket
import statistics
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from warpwatch._version import __version__
from warpwatch_diagnosis.measures.roofline import peaks_of
from warpwatch_runtime.agent_metrics import AgentMetrics
from warpwatch_telemetry.captures import Capture
from warpwatch_telemetry.jobs import JobId
from warpwatch_telemetry.metric import DEVICE_PRECEDENCE, SeriesKey
from warpwatch_telemetry.records import DeviceReading, PortReading, Record
from warpwatch_telemetry.samples import Attribution, DeviceSample, HostSample, Pod, SourceHealth
from warpwatch_telemetry.state import JobState, RankState, State

# If the most trusted source reports this, values of other sources are old.
_NOT_READABLE = frozenset({"lost", "stuck", "reset_required", "driver"})


class _Published(NamedTuple):
    at: float
    sample: DeviceSample


class DeviceTable:
    """The newest sample of every device from every source; not thread-safe.

    ``stale_after_s``: by source, how long its values are trusted; ``default_s`` for others.
    Times are of the monotonic clock.
    """

    def __init__(self, default_s: float, stale_after_s: Mapping[str, float] | None = None) -> None:
        self._default_s = default_s
        self._stale_after_s = dict(stale_after_s or {})
        self._devices: dict[str, dict[str, _Published]] = {}

    def put(self, sample: DeviceSample, at: float) -> DeviceSample | None:
        """Keep a sample, and return its trusted part, None for nothing."""
        sample = _read(sample)
        by_source = self._devices.setdefault(sample.device.uuid, {})
        known = sample.source in by_source
        by_source[sample.source] = _Published(at, sample)
        if not known:
            ordered = sorted(by_source.items(), key=lambda item: _rank(item[0]))
            by_source = self._devices[sample.device.uuid] = dict(ordered)
        in_order = [published.sample for published in by_source.values()]
        first = in_order[0]
        if sample is first:
            return sample
        if not first.up and first.reason in _NOT_READABLE:
            return None
        own = {
            key: value for key, value in sample.values.items() if _trusted(key, in_order) is sample
        }
        return replace(sample, values=own) if own and sample.up else None

    def forget(self, uuid: str, source: str) -> None:
        by_source = self._devices.get(uuid, {})
        by_source.pop(source, None)
        if not by_source:
            self._devices.pop(uuid, None)

    def merged(self, now: float) -> tuple[DeviceSample, ...]:
        """Return one sample per device, by index and instance, without stale values."""
        samples = (self._merge(by_source, now) for by_source in self._devices.values())
        return tuple(sorted(samples, key=_place))

    def _merge(self, by_source: Mapping[str, _Published], now: float) -> DeviceSample:
        """Return the sources' samples, the most trusted first, as one."""
        samples = [self._fresh(published, now) for published in by_source.values()]
        first = samples[0]
        if len(samples) == 1 or (not first.up and first.reason in _NOT_READABLE):
            return first
        readable = [sample for sample in samples if sample.up]
        if not readable:
            return first
        # A source that cannot read the device still has values known without asking it.
        keys = {key: None for sample in samples for key in sample.values}
        values = {key: _trusted(key, samples).values[key] for key in keys}
        time = readable[0].time
        processes = next((sample.processes for sample in readable if sample.processes), ())
        return DeviceSample(first.device, time, values, processes=processes, source=first.source)

    def _fresh(self, published: _Published, now: float) -> DeviceSample:
        sample = published.sample
        limit_s = self._stale_after_s.get(sample.source, self._default_s)
        if not sample.up or now - published.at <= limit_s:
            return sample
        return replace(sample, values={}, up=False, reason="stale", processes=())


def _read(sample: DeviceSample) -> DeviceSample:
    """Return the sample without NaN and infinity: an unknown value is absent."""
    values = sample.values
    if all(map(math.isfinite, values.values())):
        return sample
    finite = {key: value for key, value in values.items() if math.isfinite(value)}
    return replace(sample, values=finite)


def _rank(source: str) -> int:
    known = DEVICE_PRECEDENCE
    return known.index(source) if source in known else len(known)


def _trusted(key: SeriesKey, samples: Sequence[DeviceSample]) -> DeviceSample:
    """Return the first of the samples that has the series."""
    return next(sample for sample in samples if key in sample.values)


def _place(sample: DeviceSample) -> tuple[int, int, str]:
    instance = sample.device.gpu_instance
    return sample.device.index, int(instance) if instance.isdigit() else -1, sample.device.uuid


def ideal_steps(captures: Iterable[Capture]) -> dict[JobId, float]:
    """Return seconds of a step, by job, if its GPUs computed at their peak all the time."""
    found = {}
    for capture in captures:
        traces = (capture.diagnosis or {}).get("traces") or ()
        steps_s = [s for trace in traces if (s := _ideal_step(trace)) is not None]
        if steps_s:
            found[capture.request.job_id] = statistics.fmean(steps_s)
    return found


def _ideal_step(trace: Mapping[str, Any]) -> float | None:
    ratio = (trace.get("roofline") or {}).get("mfu_ratio")
    steps, window_s = trace.get("steps"), trace.get("window_s")
    return ratio * window_s / steps if ratio and window_s and steps else None


def mfu_ratios(
    ranks: Sequence[RankState], ideal_step_s: float | None, models: Mapping[str, str]
) -> dict[str, float]:
    """Return MFU by method of a job's running ranks. ``models``: names of GPUs by UUID."""
    running = [rank for rank in ranks if rank.steps_per_s]
    found = {"user": _mean_mfu(running, models, _by_user)}
    if running and ideal_step_s is not None:
        found["shapes"] = ideal_step_s * statistics.median(r.steps_per_s or 0.0 for r in running)
    if not any(found.values()):
        found = {"parameters": _mean_mfu(running, models, _by_parameters)}
    return {method: ratio for method, ratio in found.items() if ratio}


def _mean_mfu(
    ranks: Sequence[RankState], models: Mapping[str, str], flops_per_s: Callable[[RankState], float]
) -> float:
    """Return the mean over ranks, 0 unless all are known."""
    known = []
    for rank in ranks:
        peaks = peaks_of(models.get(rank.device or ""))
        peak = peaks.flops_per_s.get(rank.precision) if peaks else None
        known.append(flops_per_s(rank) / peak if peak else 0.0)
    return statistics.fmean(known) if known and all(known) else 0.0


def _by_user(rank: RankState) -> float:
    flops_per_s = rank.flops_per_token * (rank.tokens_per_s or 0.0)
    flops_per_s = flops_per_s or rank.flops_per_sample * (rank.samples_per_s or 0.0)
    # These ranks read the same batch, and each computes its part of it.
    sharing = (rank.parallel.get(kind, (0, 1))[1] for kind in ("tensor", "pipeline", "context"))
    return flops_per_s / math.prod(sharing)


def _by_parameters(rank: RankState) -> float:
    splits = any(size > 1 for kind, (_, size) in rank.parallel.items() if kind != "data")
    return 0.0 if splits else 6.0 * rank.parameters * (rank.tokens_per_s or 0.0)


ENERGY: SeriesKey = ("device_energy_joules_total", ())
MIG_MODE: SeriesKey = ("device_mig_mode", ())

# A rank by its job and number.
RankId = tuple[JobId, int]


class JobEnergy:
    """The energy of ranks and jobs: of a device's use, each owner and rank has an equal share."""

    def __init__(self) -> None:
        self._ranks_on: dict[str, list[RankId]] = {}
        # By device: the source of its counter, and the counter's newest value.
        self._last: dict[str, tuple[str, float]] = {}
        self._rank_joules: dict[RankId, float] = {}
        self._job_joules: dict[JobId, float] = {}
        # By job: its first tokens and joules, once both were known.
        self._first: dict[JobId, tuple[int, float]] = {}

    def follow(self, devices: Mapping[RankId, str | None]) -> None:
        """Set the device of each rank, None for an ended one; others are forgotten."""
        self._ranks_on = {}
        for key, device in devices.items():
            if device:
                self._ranks_on.setdefault(device, []).append(key)
        jobs = {job for job, _ in devices}
        self._rank_joules = {key: j for key, j in self._rank_joules.items() if key in devices}
        self._job_joules = {job: j for job, j in self._job_joules.items() if job in jobs}
        self._first = {job: first for job, first in self._first.items() if job in jobs}

    def add(self, sample: DeviceSample) -> None:
        energy = sample.values.get(ENERGY)
        if energy is None:
            return
        source, before = self._last.get(sample.device.uuid, (sample.source, energy))
        self._last[sample.device.uuid] = sample.source, energy
        ranks = self._ranks_on.get(sample.device.uuid)
        if not ranks or sample.values.get(MIG_MODE):
            return
        used = max(0.0, energy - before) if source == sample.source else 0.0
        owners = Counter(job.owner for job, _ in ranks)
        for key in ranks:
            share = used / len(owners) / owners[key[0].owner]
            self._rank_joules[key] = self._rank_joules.get(key, 0.0) + share
            self._job_joules[key[0]] = self._job_joules.get(key[0], 0.0) + share

    def joined(self, rank: RankState) -> RankState:
        joules = self._rank_joules.get((rank.job_id, rank.rank))
        return rank if joules is None else replace(rank, energy_j=joules)

    def joules(self, job: JobId) -> float | None:
        return self._job_joules.get(job)

    def tokens_per_joule(self, job: JobId, tokens: int) -> float | None:
        """Return tokens per joule since both are known, or None. ``tokens``: all ranks' total."""
        joules = self._job_joules.get(job)
        if not joules or not tokens:
            return None
        begun = self._first.setdefault(job, (tokens, joules))
        if tokens < begun[0]:
            begun = self._first[job] = tokens, joules
        spent = joules - begun[1]
        return (tokens - begun[0]) / spent if spent and tokens > begun[0] else None


# Pods are read each second; an older list may have changed.
PODS_TRUSTED_S = 15.0
# Readings that wait for the pipeline: a quarter of an hour of eight GPUs. The oldest are dropped.
MAX_READINGS = 8192


class Hub:
    """Implements ``warpwatch_devices.source.Sink``. Every method may be called from any thread.

    ``stale_after_s``: how long values are trusted; ``by_source``: of sources with another time.
    """

    def __init__(
        self,
        stale_after_s: float,
        wall: Callable[[], float] = time.time,
        by_source: Mapping[str, float] | None = None,
        monotonic: Callable[[], float] = time.monotonic,
        hostname: str = "",
        public_url: str = "",
    ) -> None:
        # The daemon's own metrics are not part of the state.
        self.metrics = AgentMetrics()
        self._wall = wall
        self._monotonic = monotonic
        self._stale_after_s = {"": stale_after_s, **(by_source or {})}
        self._lock = threading.Lock()
        self._records: deque[Record] = deque(maxlen=MAX_READINGS)
        self.readings_dropped = 0
        self._devices = DeviceTable(stale_after_s, by_source)
        self._host: dict[str, tuple[float, HostSample]] = {}
        self._attributions: dict[str, Attribution] = {}
        self._pods: tuple[float, Mapping[str, Pod]] | None = None
        self._health: dict[str, SourceHealth] = {}
        self._rank_states: Callable[[], tuple[RankState, ...]] = tuple
        self._ranks_known = False
        self._energy = JobEnergy()
        self._ideal_steps_s: dict[JobId, float] = {}
        # The fields that the daemon's own parts have published.
        hostname = hostname or socket.gethostname()
        self._known = State(0.0, __version__, hostname, public_url=public_url)

    # --- what sources publish ---

    def publish_device(self, sample: DeviceSample) -> None:
        with self._lock:
            trusted = self._devices.put(sample, self._monotonic())
            if trusted is None:
                return
            self._energy.add(trusted)
        device, values, up, reason = sample.device, trusted.values, trusted.up, trusted.reason
        load, slot = device.info.get("driver_load", ""), device.info.get("pci_bus_id", "")
        self._put(
            DeviceReading(sample.time, device.uuid, values, up, reason, device.index, load, slot)
        )

    def _put(self, record: Record) -> None:
        self.readings_dropped += len(self._records) == MAX_READINGS
        self._records.append(record)

    def forget_device(self, uuid: str, source: str = "nvml") -> None:
        with self._lock:
            self._devices.forget(uuid, source)

    def publish_host(self, sample: HostSample) -> None:
        with self._lock:
            self._host[sample.source] = (self._monotonic(), sample)
        for port, values in sample.ports.items():
            self._put(PortReading(sample.time, port, values))

    def publish_processes(self, sample: HostSample) -> None:
        with self._lock:
            self._host["processes"] = (self._monotonic(), sample)

    def publish_attribution(self, attribution: Attribution) -> None:
        with self._lock:
            self._attributions[attribution.origin] = attribution
            if attribution.pods:
                self._pods = (self._monotonic(), attribution.pods)

    def publish_health(self, health: SourceHealth) -> None:
        with self._lock:
            self._health[health.name] = health

    def count(self, name: str, *labels: str, by: float = 1.0) -> None:
        counter = self.metrics.counter(name)
        (counter.labels(*labels) if labels else counter).inc(by)

    # --- what the daemon's own parts publish ---

    def watch_ranks(self, states: Callable[[], tuple[RankState, ...]]) -> None:
        """Set the function that returns the ranks, called from any thread."""
        self._rank_states = states

    def follow_ranks(self, devices: Mapping[RankId, str | None]) -> None:
        """Set the device of each rank; None for an ended one."""
        with self._lock:
            self._ranks_known = True
            self._energy.follow(devices)

    def publish(self, **parts: Any) -> None:
        """Set fields of State: anomalies with contexts, sensitivities, captures, decisions."""
        with self._lock:
            self._known = replace(self._known, **parts)
            if "captures" in parts:
                self._ideal_steps_s = ideal_steps(self._known.captures)

    # --- what everyone reads ---

    def take_records(self) -> list[Record]:
        """Return records since the last call; only for the pipeline."""
        return [self._records.popleft() for _ in range(len(self._records))]

    def health(self) -> tuple[SourceHealth, ...]:
        with self._lock:
            return tuple(self._health.values())

    def ranks(self) -> tuple[RankState, ...]:
        return self._rank_states()

    def ranks_known(self) -> bool:
        """Return whether ranks were searched yet, which may have found none."""
        with self._lock:
            return self._ranks_known

    def devices(self) -> tuple[DeviceSample, ...]:
        with self._lock:
            return self._devices.merged(self._monotonic())

    def pods(self) -> Mapping[str, Pod] | None:
        """Return the pods of the node by UID, or None if there is no recent list."""
        with self._lock:
            known = self._pods
        if known is None or self._monotonic() - known[0] > PODS_TRUSTED_S:
            return None
        return known[1]

    def captures(self) -> tuple[Capture, ...]:
        with self._lock:
            return self._known.captures

    def job_energy(self, job: JobId) -> float | None:
        """Return the joules of its ranks' devices while this daemon ran."""
        with self._lock:
            return self._energy.joules(job)

    def state(self) -> State:
        now = self._monotonic()
        ranks = self.ranks()
        with self._lock:
            devices = self._devices.merged(now)
            return replace(
                self._known,
                time=self._wall(),
                devices=devices,
                host=self._fresh_host(now),
                sources=tuple(self._health.values()),
                ranks=tuple(self._energy.joined(rank) for rank in ranks),
                jobs=self._jobs(ranks, devices),
                attributions=tuple(self._attributions.values()),
            )

    def _fresh_host(self, now: float) -> HostSample | None:
        default_s = self._stale_after_s[""]
        fresh = [
            sample
            for source, (published_at, sample) in self._host.items()
            if now - published_at <= self._stale_after_s.get(source, default_s)
        ]
        if not fresh:
            return None
        values = {key: value for sample in fresh for key, value in sample.values.items()}
        return HostSample(max(sample.time for sample in fresh), values)

    def _jobs(
        self, ranks: Iterable[RankState], devices: Iterable[DeviceSample]
    ) -> tuple[JobState, ...]:
        by_uuid = {sample.device.uuid: sample for sample in devices}
        models = {uuid: sample.device.name for uuid, sample in by_uuid.items()}
        members: dict[JobId, list[RankState]] = {}
        for rank in ranks:
            members.setdefault(rank.job_id, []).append(rank)
        return tuple(
            JobState(
                name=job.name,
                owner=job.owner,
                run=job.run,
                world_size=max(rank.world_size for rank in of_job),
                ranks=tuple(rank.name for rank in of_job),
                energy_j=self._energy.joules(job),
                tokens_per_joule=self._energy.tokens_per_joule(
                    job, sum(rank.tokens_total for rank in of_job)
                ),
                memory_ratio=_memory_ratio(of_job, by_uuid),
                model_flops_ratio=mfu_ratios(of_job, self._ideal_steps_s.get(job), models),
                kind="serve" if of_job[0].serve else "train",
                replica=of_job[0].serve.replica if of_job[0].serve else "",
            )
            for job, of_job in sorted(members.items())
        )


def _memory_ratio(ranks: Iterable[RankState], devices: Mapping[str, DeviceSample]) -> float | None:
    """Return the largest share of a GPU's memory that a rank's tensors took, or None."""
    taken = []
    for rank in ranks:
        device = devices.get(rank.device or "")
        total = device.values.get(("device_memory_total_bytes", ())) if device else None
        if total and rank.memory_peak_allocated_bytes:
            taken.append(rank.memory_peak_allocated_bytes / total)
    return max(taken, default=None)
