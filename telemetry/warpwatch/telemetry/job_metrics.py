"""Every metric of ranks and jobs: one row each. The shim measures, the rendezvous brings them."""

from __future__ import annotations

from warpwatch.telemetry.metric import Kind, Metric


def _rank(
    name: str, kind: Kind, help: str, *labels: str, unit: str = "", origin: str = "rendezvous"
) -> Metric:
    return Metric(name, kind, help, "rank", labels=labels, unit=unit, origin=origin)


def _job(
    name: str, kind: Kind, help: str, *labels: str, unit: str = "", origin: str = "rendezvous"
) -> Metric:
    return Metric(name, kind, help, "job", labels=labels, unit=unit, origin=origin)


_STEPS = (
    _rank(
        "step_duration_seconds",
        "histogram",
        "Time from the end of one step to the end of the next.",
        unit="seconds",
    ),
    _rank("steps_total", "counter", "Finished steps."),
    _rank(
        "phase_seconds_total",
        "counter",
        "Time spent in a phase of the step; phases are disjoint.",
        "phase",
        unit="seconds",
    ),
    _rank("samples_total", "counter", "Samples trained on."),
    _rank("tokens_total", "counter", "Tokens trained on."),
)

_RANKS = (
    _rank(
        "rank_info",
        "gauge",
        "What a rank says of itself, and its owner; always 1.",
        *("host", "owner", "pid", "local_rank", "world_size", "device", "pod_uid", "framework"),
    ),
    _rank("rank_up", "gauge", "1 while the rank runs; 0 when it is stopped, exited or died."),
    _rank("rank_step", "gauge", "The newest finished step."),
    _rank("rank_step_begun", "gauge", "The step now begun on the CPU."),
    _rank(
        "rank_last_step_timestamp_seconds",
        "gauge",
        "When the newest step ended (wall clock).",
        unit="seconds",
    ),
    _rank(
        "rank_memory_allocated_bytes",
        "gauge",
        "Device memory that tensors of the rank take.",
        unit="bytes",
        origin="torch.cuda.memory_allocated",
    ),
    _rank(
        "rank_memory_reserved_bytes",
        "gauge",
        "Device memory that the allocator of the rank holds.",
        unit="bytes",
        origin="torch.cuda.memory_reserved",
    ),
    _rank("records_lost_total", "counter", "Records that a lagging reader lost; no total is."),
)

_JOBS = (
    _job("job_ranks", "gauge", "Ranks of the job that this daemon sees."),
    _job("job_world_size", "gauge", "Ranks that the job says it has."),
    _job(
        "job_energy_joules_total",
        "counter",
        "Energy that the devices of the job used while it ran.",
        unit="joules",
        origin="device_energy_joules_total of its devices",
    ),
    _job(
        "diagnosis_share_ratio",
        "gauge",
        "Share of the step window that a finding of the newest diagnosis explains.",
        "finding",
        unit="ratio",
        origin="diagnosis",
    ),
)

JOB_METRICS = _STEPS + _RANKS + _JOBS
