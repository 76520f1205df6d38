"""Every metric of ranks and jobs: one row each. The shim measures, the rendezvous brings them."""

from __future__ import annotations

from warpwatch_telemetry.metric import Kind, Metric, metric
from warpwatch_telemetry.state import PARALLELISM


def _rank(
    name: str, help: str, *labels: str, origin: str = "rendezvous", kind: Kind | None = None
) -> Metric:
    return metric(name, help, "rank", origin, *labels, kind=kind)


def _job(name: str, help: str, *labels: str, origin: str = "rendezvous") -> Metric:
    return metric(name, help, "job", origin, *labels)


_STEPS = (
    _rank(
        "step_duration_seconds",
        "Time from the end of one step to the end of the next.",
        kind="histogram",
    ),
    _rank(
        "step_seconds_total",
        "Time in finished steps. Its rate over that of step_duration_seconds_count is the mean "
        "step, which shows what quantiles of coarse buckets hide.",
    ),
    _rank("steps_total", "Finished steps."),
    _rank(
        "phase_seconds_total", "Time spent in a phase of the step; phases are disjoint.", "phase"
    ),
    _rank("samples_total", "Samples trained on."),
    _rank("tokens_total", "Tokens trained on."),
)

_RANKS = (
    _rank(
        "rank_info",
        "What a rank says of itself; always 1. step_clock is what ends a step: "
        "step(), lightning, transformers, accelerate, deepspeed, optimizer, dataloader, "
        "backward or other. data_rank and the like: the rank's place in each kind of parallelism.",
        *("host", "run", "pid", "local_rank", "world_size", "device", "pod_uid", "framework"),
        "step_clock",
        *(f"{kind}_rank" for kind in PARALLELISM),
        *("namespace", "pod"),
    ),
    _rank("rank_up", "1 while the rank runs; 0 when it is stopped, exited or died."),
    _rank("rank_step", "The newest finished step."),
    _rank("rank_step_begun", "The step now begun on the CPU."),
    _rank("rank_last_step_timestamp_seconds", "When the newest step ended (wall clock)."),
    _rank(
        "rank_memory_allocated_bytes",
        "Device memory that tensors of the rank take.",
        origin="torch.cuda.memory_allocated",
    ),
    _rank(
        "rank_memory_reserved_bytes",
        "Device memory that the allocator of the rank holds.",
        origin="torch.cuda.memory_reserved",
    ),
    _rank(
        "rank_memory_peak_allocated_bytes",
        "The most device memory that tensors of the rank took at one time.",
        origin="torch.cuda.max_memory_allocated",
    ),
    _rank(
        "rank_memory_inactive_split_bytes",
        "Device memory in free pieces of blocks that are partly in use; fragmentation is this over "
        "rank_memory_reserved_bytes.",
        origin="torch.cuda.memory_stats",
    ),
    _rank(
        "rank_allocation_retries_total",
        "Allocations that failed first and were tried again after the cache was given back.",
        origin="torch.cuda.memory_stats",
    ),
    _rank(
        "rank_out_of_memory_errors_total",
        "Out-of-memory errors of the rank's allocator.",
        origin="torch.cuda.memory_stats",
    ),
    _rank("rank_gc_seconds_total", "Time in Python's garbage collector.", origin="gc.callbacks"),
    _rank(
        "rank_gc_collections_total",
        "Collections of Python's garbage collector.",
        origin="gc.callbacks",
    ),
    _rank(
        "rank_core_wait_seconds_total",
        "Time in which threads of the rank were ready to run and had no core (run-queue delay), "
        "summed over its threads. Absent where the daemon cannot see the process.",
        origin="/proc/*/task/*/schedstat",
    ),
    _rank(
        "rank_throttled_seconds_total",
        "Time for which the CPU limit of the rank's control group held cores back, summed over "
        "cores; the same for all ranks in the group. Absent without a limit.",
        origin="cpu.stat throttled_usec",
    ),
    _rank(
        "rank_energy_joules_total",
        "Energy that the rank's device used while the rank ran, shared evenly by the ranks on it: "
        "its rate over that of steps_total or tokens_total is the energy per step or token. Absent "
        "without an energy counter and on MIG instances.",
        origin="device_energy_joules_total of its device",
    ),
    _rank("records_lost_total", "Records that a lagging reader lost; no total is."),
)

_JOBS = (
    _job("job_ranks", "Ranks of the job that this daemon sees."),
    _job("job_world_size", "Ranks that the job says it has."),
    _job(
        "job_energy_joules_total",
        "Energy that the devices of the job used while it ran: the sum over its ranks.",
        origin="device_energy_joules_total of its devices",
    ),
    _job(
        "job_model_flops_ratio",
        "Model FLOPs utilization (MFU) by method: user (FLOPs of a token or sample that the job "
        "says), shapes (counted in its newest capture with shapes) or, where neither is known, "
        "parameters (six for each that is trained, and token), of the GPUs' dense peak.",
        "method",
    ),
    _job(
        "diagnosis_share_ratio",
        "Share of the step window that a finding of the newest diagnosis explains.",
        "finding",
        origin="diagnosis",
    ),
)

JOB_METRICS = _STEPS + _RANKS + _JOBS
