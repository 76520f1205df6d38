"""PromQL about training jobs: their steps, their ranks, and the devices that these run on."""

from __future__ import annotations

from warpwatch_dashboards.queries import JOB, PLACE, RANK_KEY, rate, series, total

# The usual targets of a training.
GPU_BUSY, MEMORY, COMMUNICATION, DATA_LOADING = 0.8, 0.9, 0.2, 0.1

BY_JOB = "cluster, owner, training_job"
JOB_LEGEND = "{{training_job}}"
# What a rank does not work itself: the wait for others, and pauses that one makes for all.
_NOT_OWN = 'phase=~"comm|checkpoint|eval"'


def quantile_of_steps(quantile: float) -> str:
    """Seconds, over the steps of all ranks of a job."""
    buckets = total(f"le, {BY_JOB}", rate(series("step_duration_seconds_bucket", JOB)))
    return f"histogram_quantile({quantile}, {buckets})"


def mean_of_steps() -> str:
    """Seconds of the mean step over all ranks of a job."""
    spent = total(BY_JOB, rate(series("step_seconds_total", JOB)))
    return f"{spent} / {total(BY_JOB, rate(series('step_duration_seconds_count', JOB)))}"


def step_s() -> str:
    """Mean seconds of a step, by rank."""
    sums = total(RANK_KEY, rate(series("step_duration_seconds_sum", JOB)))
    counts = total(RANK_KEY, rate(series("step_duration_seconds_count", JOB)))
    return f"{sums} / {counts}"


def own_s(where: str = JOB) -> str:
    """Mean seconds of a step without its wait for others and declared pauses, by rank.

    What tells a late rank; the same as the recording rules'.
    """
    steps = total(RANK_KEY, rate(series("step_duration_seconds_sum", where)))
    waits = total(RANK_KEY, rate(series("phase_seconds_total", where, _NOT_OWN)))
    counts = total(RANK_KEY, rate(series("step_duration_seconds_count", where)))
    return f"({steps} - ({waits} or {steps} * 0)) / {counts}"


RUNNING = total(BY_JOB, series("rank_up", JOB))


def share_of_time(rule: str) -> str:
    """A recorded share of a job's time, while its ranks are there."""
    return f"warpwatch:job:{rule} and on ({BY_JOB}) {RUNNING}"


def lateness(where: str = JOB) -> str:
    """A rank's own time over the median of the like ranks of its job, from all nodes, less 1.

    Like are ranks of one stage of a pipeline, which the recording rules know.
    """
    own = own_s(where)
    median = f"quantile by ({BY_JOB}) (0.5, {own})"
    by_hand = f"({own}) / on ({BY_JOB}) group_left () {median}"
    rule = f"warpwatch:rank:local_seconds:ratio_to_job_median{{{where}}}"
    return f"(max by ({RANK_KEY}) ({rule}) or {by_hand}) - 1"


def share_of_steps(phase: str) -> str:
    """Share of the steps' time that a phase takes, by job; 0 where a job has no such phase."""
    steps = total(BY_JOB, rate(series("step_duration_seconds_sum", JOB)))
    spent = total(BY_JOB, rate(series("phase_seconds_total", JOB, f'phase="{phase}"')))
    return f"({spent} or {steps} * 0) / {steps}"


def ranks_by_device() -> str:
    """1 for each rank, with the UUID of its device."""
    ranks = f'label_replace({series("rank_info", JOB)}, "uuid", "$1", "device", "(.+)")'
    return f"max by ({RANK_KEY}, uuid) ({ranks})"


def of_ranks(device_expression: str) -> str:
    """A device's value for each rank that runs on it."""
    device = f"max by ({PLACE}, uuid) ({device_expression})"
    return f"{ranks_by_device()} * on ({PLACE}, uuid) group_left () {device}"


def in_order(expression: str) -> str:
    """Ranks with five digits: Prometheus answers in the order of letters, 10 before 2."""
    padded = f'label_replace({expression}, "rank", "0000$1", "rank", "(.+)")'
    return f'label_replace({padded}, "rank", "$1", "rank", ".*(.{{5}})")'


# Of the median rank. By rank first: an agent that is replaced goes on under another instance.
_STEPS_OF_RANKS = total(f"{BY_JOB}, rank", rate(series("steps_total", JOB)))
STEPS_PER_SECOND = f"quantile by ({BY_JOB}) (0.5, {_STEPS_OF_RANKS})"
BUSY_OF_RANKS = of_ranks(rate(series("device_busy_seconds_total")))
MEMORY_OF_RANKS = of_ranks(
    f"{series('device_memory_used_bytes')} / {series('device_memory_total_bytes')}"
)
