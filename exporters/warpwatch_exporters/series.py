"""Every series of a state, as the identity and the values that the catalogue's rows describe."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from itertools import islice, zip_longest
from typing import Any, NamedTuple

from warpwatch_exporters.events import anomaly_link
from warpwatch_telemetry.anomalies import KINDS, Anomaly, first_sentence, scope_of
from warpwatch_telemetry.catalogue import CATALOGUE
from warpwatch_telemetry.jobs import JobId, whose
from warpwatch_telemetry.metric import IDENTITY_LABELS, SeriesKey
from warpwatch_telemetry.samples import Attribution, DeviceSample, Pod, Workload
from warpwatch_telemetry.state import (
    COARSE_STEP_BOUNDS_S,
    LATENCY_BOUNDS_S,
    PARALLELISM,
    STEP_DURATION_BOUNDS_S,
    Histogram,
    JobState,
    RankState,
    ServeState,
    State,
)

logger = logging.getLogger(__name__)

# More ranks than this are counted, not exported.
MAX_RANKS = 1000
# More active anomalies than this are counted by kind, not described.
MAX_ANOMALIES = 200

# The exported cumulated counts of step durations, by the label ``le``.
FINE_BUCKETS = {repr(bound): index for index, bound in enumerate(STEP_DURATION_BOUNDS_S)}
FINE_BUCKETS["+Inf"] = len(STEP_DURATION_BOUNDS_S)
BUCKETS = {bound: FINE_BUCKETS[bound] for bound in (*map(repr, COARSE_STEP_BOUNDS_S), "+Inf")}
# The buckets of a server's latencies: all of them, and every fifth.
_FINE_LATENCIES = {repr(bound): index for index, bound in enumerate(LATENCY_BOUNDS_S)}
_FINE_LATENCIES["+Inf"] = len(LATENCY_BOUNDS_S)
_LATENCIES = {
    bound: index
    for bound, index in _FINE_LATENCIES.items()
    if index % 5 == 0 or index == len(LATENCY_BOUNDS_S)
}
_LATENCY_NAMES = {
    "first_token": "serve_time_to_first_token_seconds",
    "inter_token": "serve_inter_token_seconds",
    "queue": "serve_queue_seconds",
}

_NO_POD = Pod("", "")

# The values of a scope's IDENTITY_LABELS.
Identity = tuple[str, ...]
Values = Mapping[SeriesKey, float]


class SeriesGroup(NamedTuple):
    """The series of one identity. ``workload`` is whose labels its series carry, if any."""

    identity: Identity
    values: Values
    workload: Workload | None = None


class HistogramSeries(NamedTuple):
    """A histogram of a rank. ``buckets``: indices of its exported counts by the label ``le``."""

    key: SeriesKey
    histogram: Histogram
    buckets: Mapping[str, int]


def histograms_of(rank: RankState, fine: bool) -> Iterator[HistogramSeries]:
    """Yield the histograms of a rank; ``fine``: with all buckets."""
    serve = rank.serve
    if serve is None:
        buckets = FINE_BUCKETS if fine else BUCKETS
        yield HistogramSeries(("step_duration_seconds", ()), rank.durations, buckets)
        return
    buckets = _FINE_LATENCIES if fine else _LATENCIES
    if not any(rank.parallel.get(kind, (0, 1))[0] for kind in ("tensor", "pipeline")):
        for work, histogram in serve.iterations.items():
            key = ("serve_iteration_duration_seconds", (work,))
            yield HistogramSeries(key, histogram, buckets)
    for latency, histogram in serve.latencies.items():
        yield HistogramSeries((_LATENCY_NAMES[latency], ()), histogram, buckets)


ENDED = ("exited", "died")
_DESCRIPTIONS = ("driver_version", "pci_bus_id", "vbios_version", "serial", "architecture")


def series_of(state: State, *, inline_workloads: bool = False) -> Iterator[SeriesGroup]:
    """Yield all series except histograms, none twice."""
    for sample in state.devices:
        yield from _device(sample, state.attributions, inline_workloads)
    pods = _pods(state)
    for rank in exported_ranks(state):
        yield SeriesGroup(rank.key, _rank(rank, pods.get(rank.pod_uid or "", _NO_POD)))
    shares = _diagnosis_shares(state)
    # If two runs have one name, the live one comes last and is exported.
    live = {rank.job_id for rank in state.ranks if rank.status not in ENDED}
    jobs: dict[Identity, Values] = {
        (job.name, job.owner, job.replica): _job(job)
        for job in sorted(state.jobs, key=lambda job: job.job_id in live)
    }
    for key in jobs | shares:
        yield SeriesGroup(key, {**jobs.get(key, {}), **shares.get(key, {})})
    host = state.host.values if state.host is not None else {}
    attributed = _attributed(state.attributions, pods)
    yield SeriesGroup((), {**host, **attributed, **_agent(state, pods)})


def labels_of(group: SeriesGroup, key: SeriesKey) -> dict[str, str] | None:
    """Return the labels of a series of the group; None outside of the catalogue."""
    name, own = key
    row = CATALOGUE.get(name)
    identity = IDENTITY_LABELS[row.scope] if row else ()
    if row is None or len(own) != len(row.labels) or len(group.identity) != len(identity):
        logger.warning("not exported, since the catalogue has no such series: %s %s", name, own)
        return None
    labels = {label: value for label, value in zip(identity, group.identity, strict=True) if value}
    labels |= zip(row.labels, own, strict=True)
    if not labels.get("node", "-"):
        # An empty one would hide the node of the scraped target.
        del labels["node"]
    if group.workload:
        labels |= asdict(group.workload)
    return labels


def _pods(state: State) -> Mapping[str, Pod]:
    return {uid: pod for origin in state.attributions for uid, pod in origin.pods.items()}


def workloads_of(uuid: str, attributions: Iterable[Attribution]) -> tuple[Workload, ...]:
    """Return the containers that a device is allocated to, from every origin."""
    found = {workload for origin in attributions for workload in origin.workloads.get(uuid, ())}
    return tuple(sorted(found))


def exported_ranks(state: State) -> Iterable[RankState]:
    """Return at most MAX_RANKS ranks, one per identity."""
    by_key: dict[Identity, RankState] = {}
    for rank in sorted(state.ranks, key=lambda rank: rank.status in ENDED):
        if len(by_key) < MAX_RANKS:
            by_key.setdefault(rank.key, rank)
    return by_key.values()


def _device(
    sample: DeviceSample, attributions: tuple[Attribution, ...], inline: bool
) -> Iterator[SeriesGroup]:
    device = sample.device
    identity = (str(device.index), device.uuid, device.gpu_instance, device.profile)
    workloads = workloads_of(device.uuid, attributions)
    holder = workloads[0] if inline and len(workloads) == 1 else None
    yield SeriesGroup(identity, _device_facts(sample), holder)
    yield SeriesGroup(identity, sample.values, holder)
    yield SeriesGroup(identity, _device_users(device.uuid, workloads, attributions))


def _device_facts(sample: DeviceSample) -> Values:
    device = sample.device
    descriptions = tuple(device.info.get(name, "") for name in _DESCRIPTIONS)
    info = (device.name, *descriptions, device.info.get("simulated", ""))
    facts: dict[SeriesKey, float] = {
        ("device_up", (sample.reason,)): int(sample.up),
        ("device_info", info): 1,
    }
    links = [up for (name, _), up in sample.values.items() if name == "device_nvlink_link_up"]
    if links:
        facts["device_nvlink_links", ()] = len(links)
        facts["device_nvlink_links_up", ()] = sum(links)
    if sample.up:
        facts["device_sample_timestamp_seconds", ()] = round(sample.time, 3)
    for process in sample.processes:
        own = (str(process.pid), process.name)
        if process.memory_bytes is not None:
            facts["process_gpu_memory_bytes", own] = process.memory_bytes
        if process.sm_ratio is not None:
            facts["process_gpu_utilization_ratio", own] = process.sm_ratio
    return facts


def _device_users(
    uuid: str, workloads: tuple[Workload, ...], attributions: Iterable[Attribution]
) -> Values:
    users: dict[SeriesKey, float] = {
        ("device_workload_info", (held.namespace, held.pod, held.container)): 1
        for held in workloads
    }
    for origin in attributions:
        for job in origin.slurm_jobs.get(uuid, ()):
            users["device_slurm_job_info", job] = 1
    return users


def _attributed(attributions: Iterable[Attribution], pods: Mapping[str, Pod]) -> Values:
    """Return the reading time of each origin, and the owners of processes."""
    values: dict[SeriesKey, float] = {}
    for origin in attributions:
        values["attribution_timestamp_seconds", (origin.origin,)] = round(origin.time, 3)
        for pid, owner in origin.processes.items():
            slurm_job = owner.slurm.id if owner.slurm else ""
            pod = pods.get(owner.pod_uid, _NO_POD)
            info = (str(pid), owner.name, owner.pod_uid, owner.container_id, slurm_job)
            values["process_info", (*info, pod.namespace, pod.name)] = 1
    return values


def _rank(rank: RankState, pod: Pod) -> Values:
    pid, local_rank, world_size = str(rank.pid), str(rank.local_rank), str(rank.world_size)
    place = (rank.host, rank.run, pid, local_rank, world_size)
    device, pod_uid = rank.device or "", rank.pod_uid or ""
    places = (rank.parallel.get(kind) for kind in PARALLELISM)
    parallel = (str(place[0]) if place else "" for place in places)
    program = (rank.framework, rank.step_clock, *parallel)
    kind = ("serve", rank.serve.role) if rank.serve else ("train", "rank")
    about = (*place, device, pod_uid, *program, whose(rank.owner)[0], pod.name, *kind)
    values: dict[SeriesKey, float | None] = {
        ("rank_info", about): 1,
        ("rank_up", ()): int(rank.status == "running"),
        **(_rank_now(rank) if rank.status in ("running", "stopped") else {}),
        **_rank_counters(rank),
        **(_steps(rank) if rank.serve is None else _serve(rank.serve)),
    }
    known = {key: value for key, value in values.items() if value is not None}
    phases = {("phase_seconds_total", (name,)): s for name, s in rank.phases_s.items()}
    return known | phases


def _rank_now(rank: RankState) -> Mapping[SeriesKey, float | None]:
    return {
        ("rank_step", ()): rank.step,
        ("rank_step_begun", ()): rank.step_begun,
        ("rank_memory_allocated_bytes", ()): rank.memory_allocated_bytes,
        ("rank_memory_reserved_bytes", ()): rank.memory_reserved_bytes,
        ("rank_memory_peak_allocated_bytes", ()): rank.memory_peak_allocated_bytes,
        ("rank_memory_inactive_split_bytes", ()): rank.memory_inactive_split_bytes,
    }


def _steps(rank: RankState) -> Mapping[SeriesKey, float | None]:
    """Return the series of a training's steps."""
    return {
        ("rank_last_step_timestamp_seconds", ()): rank.last_step_time,
        ("step_seconds_total", ()): rank.durations.sum,
        ("steps_total", ()): rank.steps_total,
        # A program that does not say how many has not processed none.
        ("samples_total", ()): rank.samples_total or None,
        ("tokens_total", ()): rank.tokens_total or None,
    }


def _serve(serve: ServeState) -> Mapping[SeriesKey, float | None]:
    """Return the series of a server's process that are not histograms."""
    counts = serve.counts
    hits, queries = counts.get("prefix_hit_tokens"), counts.get("prefix_query_tokens")
    missed = None if hits is None or queries is None else max(0, queries - hits)
    return {
        ("serve_idle_seconds_total", ()): serve.idle_s,
        ("serve_requests", ("running",)): serve.running,
        ("serve_requests", ("waiting",)): serve.waiting,
        ("serve_kv_cache_usage_ratio", ()): serve.kv_usage,
        ("serve_tokens_total", ("prompt",)): counts.get("prompt_tokens"),
        ("serve_tokens_total", ("generated",)): counts.get("generated_tokens"),
        ("serve_preemptions_total", ()): counts.get("preemptions"),
        ("serve_prefix_tokens_total", ("true",)): hits,
        ("serve_prefix_tokens_total", ("false",)): missed,
    }


def _rank_counters(rank: RankState) -> Mapping[SeriesKey, float | None]:
    return {
        ("records_lost_total", ()): rank.lost_records,
        ("rank_allocation_retries_total", ()): rank.allocation_retries_total,
        ("rank_out_of_memory_errors_total", ()): rank.out_of_memory_errors_total,
        ("rank_gc_seconds_total", ()): rank.gc_s,
        ("rank_gc_collections_total", ()): rank.gc_collections_total,
        ("rank_core_wait_seconds_total", ()): rank.core_wait_s,
        ("rank_throttled_seconds_total", ()): rank.throttled_s,
        ("rank_energy_joules_total", ()): rank.energy_j,
    }


def _job(job: JobState) -> dict[SeriesKey, float]:
    values: dict[SeriesKey, float] = {
        ("job_ranks", ()): len(job.ranks),
        ("job_world_size", ()): job.world_size,
    }
    if job.energy_j is not None:
        values["job_energy_joules_total", ()] = job.energy_j
    for method, ratio in job.model_flops_ratio.items():
        values["job_model_flops_ratio", (method,)] = ratio
    return values


def _diagnosis_shares(state: State) -> dict[Identity, dict[SeriesKey, float]]:
    """Return by job the share of each finding in the newest diagnosis: the largest of its ranks."""
    newest: dict[Identity, tuple[float, Mapping[str, Any]]] = {}
    replicas = {job.job_id: job.replica for job in state.jobs}
    for capture in state.captures:
        asked = capture.request
        job = (asked.job, asked.owner, replicas.get(asked.job_id, ""))
        if capture.diagnosis is not None and capture.time >= newest.get(job, (0.0, {}))[0]:
            newest[job] = (capture.time, capture.diagnosis)
    return {job: _findings(diagnosis) for job, (_, diagnosis) in newest.items()}


def _findings(diagnosis: Mapping[str, Any]) -> dict[SeriesKey, float]:
    shares: dict[SeriesKey, float] = {}
    for finding in diagnosis.get("findings") or ():
        share = finding.get("share")
        if isinstance(share, int | float):
            key = ("diagnosis_share_ratio", (str(finding.get("kind", "")),))
            shares[key] = max(share, shares.get(key, 0.0))
    return shares


def _agent(state: State, pods: Mapping[str, Pod]) -> Values:
    values: dict[SeriesKey, float] = {("build_info", (state.version,)): 1}
    for source in state.sources:
        values["source_up", (source.name,)] = int(source.up)
        values["source_duration_seconds", (source.name,)] = round(source.duration_s, 6)
        values["source_errors_total", (source.name,)] = source.errors
    values["ranks_unexported", ()] = len(state.ranks) - len(list(exported_ranks(state)))
    for one in state.sensitivities:
        values["detector_blind", (one.kind, one.job, one.owner)] = int(one.blind)
    return {**values, **_anomalies(state, pods)}


def _anomalies(state: State, pods: Mapping[str, Pod]) -> Values:
    """Return the number of active anomalies by kind, 0 included, and their subjects."""
    active = [anomaly for anomaly in state.anomalies if anomaly.end_time is None]
    counts = Counter(dict.fromkeys(((kind, "") for kind in KINDS), 0))
    counts.update((anomaly.kind, anomaly.node) for anomaly in active)
    values: dict[SeriesKey, float] = {("anomaly_active", key): n for key, n in counts.items()}
    pod_uids: dict[tuple[JobId | None, int | None], str] = {
        (rank.job_id, rank.rank): rank.pod_uid or "" for rank in state.ranks
    }
    for anomaly in _described(active):
        rank = "" if anomaly.rank is None else str(anomaly.rank)
        device, gpu = anomaly.device or "", "" if anomaly.gpu is None else str(anomaly.gpu)
        what = (anomaly.kind, anomaly.severity, scope_of(anomaly.kind))
        job = (anomaly.job or "", rank, anomaly.owner, *whose(anomaly.owner))
        pod_uid = pod_uids.get((anomaly.job_id, anomaly.rank), "")
        node = anomaly.node or (state.hostname if anomaly.judged_by == "agent" else "")
        where = (pods.get(pod_uid, _NO_POD).name, node)
        link = anomaly_link(state.public_url, anomaly.id)
        texts = (first_sentence(anomaly, state.hostname), link)
        values["anomaly_info", (*what, *job, gpu, device, *where, *texts)] = 1
    return values


def _described(active: Iterable[Anomaly]) -> list[Anomaly]:
    """Return at most MAX_ANOMALIES: of each kind and severity in turn, so that none is silent."""
    found: dict[tuple[str, str], list[Anomaly]] = {}
    for anomaly in sorted(active, key=lambda one: -one.time):
        found.setdefault((anomaly.kind, anomaly.severity), []).append(anomaly)
    in_turn = (one for turn in zip_longest(*found.values()) for one in turn if one is not None)
    return list(islice(in_turn, MAX_ANOMALIES))
