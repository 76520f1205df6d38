"""PromQL about training jobs: their steps, their ranks, and the devices that these run on."""

from __future__ import annotations

from warpwatch_dashboards.queries import JOB, PLACE, RANK_KEY, rate, series, total

# The usual targets of a training.
GPU_BUSY, MEMORY, COMMUNICATION, DATA_LOADING = 0.8, 0.9, 0.2, 0.1

BY_JOB = "cluster, owner, training_job"
JOB_LEGEND = "{{training_job}}"
# Time that is not a rank's own: waits for others, and pauses for all ranks.
_NOT_OWN = 'phase=~"comm|checkpoint|eval"'


def quantile_of_steps(quantile: float) -> str:
    """Return a quantile of step seconds over all ranks of a job."""
    buckets = total(f"le, {BY_JOB}", rate(series("step_duration_seconds_bucket", JOB)))
    return f"histogram_quantile({quantile}, {buckets})"


def mean_of_steps() -> str:
    """Return the mean seconds of a step over all ranks of a job."""
    spent = total(BY_JOB, rate(series("step_seconds_total", JOB)))
    return f"{spent} / {total(BY_JOB, rate(series('step_duration_seconds_count', JOB)))}"


def step_s() -> str:
    """Return the mean seconds of a step, by rank."""
    sums = total(RANK_KEY, rate(series("step_duration_seconds_sum", JOB)))
    counts = total(RANK_KEY, rate(series("step_duration_seconds_count", JOB)))
    return f"{sums} / {counts}"


def own_s(where: str = JOB) -> str:
    """Return the mean seconds of a step without waits for others and declared pauses, by rank."""
    steps = total(RANK_KEY, rate(series("step_duration_seconds_sum", where)))
    waits = total(RANK_KEY, rate(series("phase_seconds_total", where, _NOT_OWN)))
    counts = total(RANK_KEY, rate(series("step_duration_seconds_count", where)))
    return f"({steps} - ({waits} or {steps} * 0)) / {counts}"


RUNNING = total(BY_JOB, series("rank_up", JOB))


def share_of_time(rule: str) -> str:
    """Return a recorded share of a job's time, while it has ranks."""
    return f"warpwatch:job:{rule} and on ({BY_JOB}) {RUNNING}"


def lateness(where: str = JOB) -> str:
    """Return a rank's own time over the median of like ranks of its job on all nodes, less 1."""
    own = own_s(where)
    median = f"quantile by ({BY_JOB}) (0.5, {own})"
    by_hand = f"({own}) / on ({BY_JOB}) group_left () {median}"
    rule = f"warpwatch:rank:local_seconds:ratio_to_job_median{{{where}}}"
    return f"(max by ({RANK_KEY}) ({rule}) or {by_hand}) - 1"


def share_of_steps(phase: str) -> str:
    """Return a phase's share of the steps' time by job; 0 for jobs without the phase."""
    steps = total(BY_JOB, rate(series("step_duration_seconds_sum", JOB)))
    spent = total(BY_JOB, rate(series("phase_seconds_total", JOB, f'phase="{phase}"')))
    return f"({spent} or {steps} * 0) / {steps}"


def ranks_by_device() -> str:
    """Return 1 for each rank, with its device's UUID."""
    ranks = f'label_replace({series("rank_info", JOB)}, "uuid", "$1", "device", "(.+)")'
    return f"max by ({RANK_KEY}, uuid) ({ranks})"


def of_ranks(device_expression: str) -> str:
    """Return a device's value for each rank that runs on it."""
    device = f"max by ({PLACE}, uuid) ({device_expression})"
    return f"{ranks_by_device()} * on ({PLACE}, uuid) group_left () {device}"


def in_order(expression: str) -> str:
    """Pad ranks to five digits: Prometheus sorts by letters, 10 before 2."""
    padded = f'label_replace({expression}, "rank", "0000$1", "rank", "(.+)")'
    return f'label_replace({padded}, "rank", "$1", "rank", ".*(.{{5}})")'


# For the median rank. By rank first: an agent that is replaced goes on under another instance.
_STEPS_OF_RANKS = total(f"{BY_JOB}, rank", rate(series("steps_total", JOB)))
STEPS_PER_SECOND = f"quantile by ({BY_JOB}) (0.5, {_STEPS_OF_RANKS})"
BUSY_OF_RANKS = of_ranks(rate(series("device_busy_seconds_total")))
MEMORY_OF_RANKS = of_ranks(
    f"{series('device_memory_used_bytes')} / {series('device_memory_total_bytes')}"
)
