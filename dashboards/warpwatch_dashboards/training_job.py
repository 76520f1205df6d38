"""*Training job*: how fast it is, where its time goes, which rank holds it up, what it costs."""

from __future__ import annotations

from grafana_foundation_sdk.models import dashboard as models

from warpwatch_dashboards import links, variables
from warpwatch_dashboards.page import Page, Row
from warpwatch_dashboards.panels import (
    EMPTY_WHEN_HEALTHY,
    Column,
    anomalies_now,
    at_least,
    at_most,
    graph,
    heat_map,
    newest_diagnosis,
    number,
    table,
)
from warpwatch_dashboards.queries import (
    BUSY_OF_RANKS,
    BY_JOB,
    COMMUNICATION,
    DATA_LOADING,
    GPU_BUSY,
    JOB,
    JOB_LEGEND,
    MEMORY,
    MEMORY_OF_RANKS,
    PLACE,
    RANK_KEY,
    RANK_LEGEND,
    RUNNING,
    STEPS_PER_SECOND,
    WINDOW,
    Query,
    grown,
    in_order,
    lateness,
    mean_of_steps,
    own_s,
    quantile_of_steps,
    ranks_by_device,
    rate,
    series,
    share_of_steps,
    share_of_time,
    step_s,
    total,
    workloads,
)


def page() -> Page:
    return Page(
        uid=links.TRAINING_JOB,
        title="Warpwatch / Training job",
        description="One job over all its nodes: speed, phases, stragglers, memory, energy.",
        variables=[
            *variables.of_agents(),
            variables.namespace(),
            variables.job(),
        ],
        annotations=variables.marks_of_jobs(),
        rows=[
            _TARGETS_ROW,
            _STEPS_ROW,
            _PHASES_ROW,
            _RANKS_ROW,
            _MEMORY_ROW,
            _ENERGY_ROW,
            _REASONS_ROW,
        ],
    )


_FLOPS = f"max by ({BY_JOB}, method) ({series('job_model_flops_ratio', JOB)})"
_WORLD_SIZE = series("job_world_size", JOB)
_TARGETS_ROW = Row(
    "Targets",
    [
        number(
            "Ranks that run",
            "Share of the job's world size that lives now, over all nodes. Less: a node is not "
            "watched, or ranks died.",
            Query(f"{RUNNING} / max by ({BY_JOB}) ({_WORLD_SIZE})", JOB_LEGEND),
            unit="percentunit",
            limits=at_least(1),
            width=3,
        ),
        number(
            "Goodput",
            "Share of its ranks' time in finished steps, without waiting for data, checkpoints, "
            "evaluation, hangs and restarts: docs/alerts.md. Needs the recording rules.",
            Query(share_of_time("goodput:ratio_rate10m"), JOB_LEGEND),
            unit="percentunit",
            limits=at_least(0.8),
            width=3,
        ),
        number(
            "MFU",
            "Model FLOPs utilization: the FLOPs that the model needs by what the GPUs could do, as "
            "the job says (user) or a capture counted (shapes). Of jobs of which it is known.",
            Query(_FLOPS, f"{JOB_LEGEND} {{{{method}}}}"),
            unit="percentunit",
            width=3,
        ),
        number(
            "GPU busy",
            "Share of time in which a kernel ran on the job's GPUs. Aim above 80 %: below, they "
            "wait for data, for the host or for each other.",
            Query(f"avg by ({BY_JOB}) ({BUSY_OF_RANKS})", JOB_LEGEND),
            unit="percentunit",
            limits=at_least(GPU_BUSY),
            width=3,
        ),
        number(
            "GPU memory",
            "Memory in use on the fullest of the job's GPUs. Aim below 90 %: above, allocations "
            "are retried and the next large batch fails.",
            Query(f"max by ({BY_JOB}) ({MEMORY_OF_RANKS})", JOB_LEGEND),
            unit="percentunit",
            limits=at_most(MEMORY),
        ),
        number(
            "Communication",
            "Share of the steps' time that ranks wait for others; communication hidden behind "
            "compute is not in it. Aim below 20 %. High on all but one rank: that one is late.",
            Query(share_of_steps("comm"), JOB_LEGEND),
            unit="percentunit",
            limits=at_most(COMMUNICATION),
        ),
        number(
            "Data loading",
            "Share of the steps' time that ranks wait for the next batch. Aim below 10 %: more "
            "loader workers, faster storage, less work a sample.",
            Query(share_of_steps("data_wait"), JOB_LEGEND),
            unit="percentunit",
            limits=at_most(DATA_LOADING),
        ),
    ],
)


_JOULES = rate(series("rank_energy_joules_total", JOB))
_POWER = total(BY_JOB, _JOULES)
_TOKENS = total(BY_JOB, rate(series("tokens_total", JOB)))
_ENERGY_ROW = Row(
    "Energy",
    [
        graph(
            "GPU power",
            "What the job's GPUs draw. It falls where they wait.",
            Query(_POWER, JOB_LEGEND),
            unit="watt",
        ),
        graph(
            "Energy per step",
            "GPU energy of all ranks for one step. The same model in the same setting costs the "
            "same: a rise is waste.",
            Query(f"{_POWER} / {STEPS_PER_SECOND}", JOB_LEGEND),
            unit="joule",
        ),
        graph(
            "Energy per token",
            "GPU energy for one token, of jobs that tell tokens: the figure to compare hardware "
            "and settings by.",
            Query(f"{_POWER} / {_TOKENS}", JOB_LEGEND),
            unit="joule",
        ),
        number(
            "GPU energy",
            "Energy that the job's GPUs used in the time shown. 3.6 MJ are 1 kWh.",
            Query(
                total(BY_JOB, f"increase({series('job_energy_joules_total', JOB)}[$__range])"),
                JOB_LEGEND,
            ),
            unit="joule",
            width=6,
            height=8,
        ),
    ],
    width=6,
)


_RECORDS_LOST = total(BY_JOB, rate(series("records_lost_total", JOB)))
_REASONS_ROW = Row(
    "Why",
    [
        newest_diagnosis(
            "Share of the steps that each finding of the newest capture's diagnosis explains. "
            "The report, linked from the marks in the graphs, says what to do about it."
        ),
        anomalies_now("job"),
        graph(
            "After captures",
            "Median step after a job's newest capture by the median before it. Above 1.05: "
            f"something of the capture stayed. {EMPTY_WHEN_HEALTHY}",
            Query(f"max by ({BY_JOB}) ({series('capture_residual_ratio', JOB)})", JOB_LEGEND),
            limits=at_most(1.05),
            width=4,
        ),
        graph(
            "Records lost",
            "Records of steps that the agent could not read in time. Totals and averages here "
            "stay right; detectors see fewer steps.",
            Query(_RECORDS_LOST, JOB_LEGEND),
            unit="si:records/s",
            width=4,
        ),
    ],
)


_NODE = f"{PLACE}, owner, training_job"
_FIRST_RANKS = series("rank_info", 'cluster=~"$cluster",training_job=~"$job"', 'rank="0"')


def _by_run(name: str) -> str:
    """Return a counter's rate over the ranks of each run.

    Without an id of its own a run is called otherwise on each node. All nodes of a job that have
    no rank 0 are of the run of the one that has it; each that has one runs by itself.
    """
    run = f"max by ({_NODE}, run) ({_FIRST_RANKS})"
    rates = total(_NODE, rate(series(name, JOB)))
    own = total(f"{BY_JOB}, run", f"{run} * on ({_NODE}) group_left () {rates}")
    others = total(BY_JOB, f"({rates} unless on ({_NODE}) {run})")
    elsewhere = f"max by ({BY_JOB}, run) ({run}) * on ({BY_JOB}) group_left () {others}"
    return f"({own} + on ({BY_JOB}) group_left () {others} or {own} or {elsewhere})"


def _over_time(expression: str) -> str:
    return f"avg_over_time(({expression})[$__range:$__interval])"


_RUN_STEP_S = f"{_by_run('step_seconds_total')} / ({_by_run('steps_total')} > 0)"
_RUN_TOKENS = _by_run("tokens_total")
_STEPS_ROW = Row(
    "Speed",
    [
        graph(
            "Step time",
            "The mean over the steps of all ranks, and percentiles, which move from bucket to "
            "bucket. A mean that rises by a few per cent and stays is a regression; p99 alone "
            "rises with checkpoints, evaluation and lone slow steps.",
            Query(mean_of_steps(), f"{JOB_LEGEND} mean"),
            Query(quantile_of_steps(0.5), f"{JOB_LEGEND} p50"),
            Query(quantile_of_steps(0.99), f"{JOB_LEGEND} p99"),
            unit="s",
            width=12,
        ),
        heat_map(
            "Step time by rank",
            "Mean step time of each rank. In synchronous training all ranks change together: who "
            "is the cause is seen in their own time, below.",
            Query(in_order(step_s()), RANK_LEGEND),
            unit="s",
            width=12,
        ),
        graph(
            "Steps",
            "Steps a second. 0 is a hang, a long checkpoint or an evaluation.",
            Query(STEPS_PER_SECOND, JOB_LEGEND),
            unit="si:steps/s",
        ),
        graph(
            "Samples",
            "Samples a second over all ranks, of jobs that tell them.",
            Query(total(BY_JOB, rate(series("samples_total", JOB))), JOB_LEGEND),
            unit="si:samples/s",
        ),
        graph(
            "Tokens",
            "Tokens a second over all ranks, of jobs that tell them: the rate to compare runs by.",
            Query(total(BY_JOB, rate(series("tokens_total", JOB))), JOB_LEGEND),
            unit="si:tokens/s",
        ),
        table(
            "Runs",
            "The runs of the job in the time shown, to compare: mean step and tokens a second.",
            [
                Column(_over_time(_RUN_STEP_S), "Mean step", "s"),
                Column(_over_time(_RUN_TOKENS), "Tokens a second", "si:tokens/s"),
            ],
            width=24,
        ),
    ],
)


_BY_PHASE = f"{BY_JOB}, phase"
_SPENT = rate(series("phase_seconds_total", JOB))
_COUNTED = total(BY_JOB, rate(series("step_duration_seconds_count", JOB)))
_WHOLE = total(BY_JOB, rate(series("step_duration_seconds_sum", JOB)))
_PHASES = f"{total(_BY_PHASE, _SPENT)} / on ({BY_JOB}) group_left () {_COUNTED}"
_COLLECTING = total(RANK_KEY, rate(series("rank_gc_seconds_total", JOB)))
_OTHER = f"({_WHOLE} - {total(BY_JOB, _SPENT)}) / {_COUNTED}"
_GOOD, _SLOW, _DOWN, _PAUSES = (
    share_of_time(rule)
    for rule in (
        *("goodput:ratio_rate10m", "slow_steps:share_rate10m", "ranks_down:share10m"),
        "pauses:share_rate10m",
    )
)
_SLOW_OR_NONE = f"({_SLOW} or {_GOOD} * 0)"
_PAUSED = f"(sum by ({BY_JOB}) ({_PAUSES}) or {_GOOD} * 0)"
_LOST = f"clamp_min(1 - ({_GOOD}) - {_PAUSED} - ({_DOWN}), 0)"
_PHASES_ROW = Row(
    "Where the time goes",
    [
        graph(
            "Where the ranks' time went",
            "Goodput and what is missing from it: slow steps (beyond those of the job's fastest "
            "quarter), waiting for data, checkpoints, evaluation, ranks that were down (crashes, "
            "restarts), and time without a step (hangs, starts). Needs the recording rules.",
            Query(f"({_GOOD}) - {_SLOW_OR_NONE}", f"{JOB_LEGEND} productive"),
            Query(_SLOW_OR_NONE, f"{JOB_LEGEND} slow steps"),
            Query(_PAUSES, f"{JOB_LEGEND} {{{{phase}}}}"),
            Query(_DOWN, f"{JOB_LEGEND} down"),
            Query(_LOST, f"{JOB_LEGEND} no step"),
            unit="percentunit",
            stacked=True,
            maximum=1,
            width=24,
        ),
        graph(
            "Phases of a step",
            "Seconds of a mean step by phase, one upon the other; other is what no phase tells. "
            "The phase that grew with the step time is where to look.",
            Query(_PHASES, f"{JOB_LEGEND} {{{{phase}}}}"),
            Query(_OTHER, f"{JOB_LEGEND} other"),
            unit="s",
            stacked=True,
            width=16,
        ),
        graph(
            "Garbage collection",
            "Share of time in Python's garbage collector, the ten ranks with the most. Ranks that "
            "collect at different times make all others wait: collect on all at the same step.",
            Query(f"topk(10, {_COLLECTING})", RANK_LEGEND),
            unit="percentunit",
        ),
    ],
)


def _where_ranks_run() -> models.Panel:
    key = f"{RANK_KEY}, host, local_rank, device, framework, step_clock"
    holders = workloads('namespace!=""')
    # If several share a GPU, it is unknown which is the rank's.
    pods = f"({holders} and on ({PLACE}, uuid) count by ({PLACE}, uuid) ({holders}) == 1)"
    owners = f"{ranks_by_device()} * on ({PLACE}, uuid) group_left (namespace, pod) {pods}"
    return table(
        "Where ranks run",
        "Each rank's node, GPU and pod (not where several pods share the GPU), the versions it "
        "runs on, and what ends a step of it (step_clock). Versions that differ between ranks are "
        "a fault of the image.",
        [
            Column(f"max by ({key}) ({series('rank_info', JOB)})"),
            Column(f"max by ({RANK_KEY}, namespace, pod) ({owners})"),
            Column(f"max by ({RANK_KEY}) ({series('rank_up', JOB)})", "Up", "none", at_least(1)),
        ],
        width=24,
        links=[links.node_of_row()],
    )


_NEWEST = f"max by ({BY_JOB}) ({series('rank_step', JOB)})"
_STEP = f"max by ({RANK_KEY}) ({series('rank_step', JOB)})"
_ENDED = f"max by ({RANK_KEY}) ({series('rank_last_step_timestamp_seconds', JOB)})"
_RANKS_ROW = Row(
    "Ranks",
    [
        heat_map(
            "Own time by rank",
            "Mean step time without the wait for others, checkpoints and evaluation. One line "
            "that is warmer than the rest is the straggler: look at its node's clocks, "
            "temperature and PCIe.",
            Query(in_order(own_s()), RANK_LEGEND),
            unit="s",
            width=12,
        ),
        graph(
            "Stragglers",
            "The ten latest ranks: own time over the median of the job's ranks, from all nodes, "
            "less 1. One that stays above 10 % holds all others up.",
            Query(f"topk(10, {lateness()})", RANK_LEGEND),
            unit="percentunit",
            limits=at_most(0.1, 0.25),
            links=[links.node_of_series()],
            width=12,
        ),
        graph(
            "Since the last step",
            "Time since each rank finished a step, the ten longest, up to the step time and the "
            "interval of the scrapes while all is well. A line that climbs is a hang.",
            Query(f"topk(10, time() - {_ENDED})", RANK_LEGEND),
            unit="s",
        ),
        graph(
            "Steps behind",
            "How many steps each rank is behind the first, the ten farthest. Nodes are scraped one "
            "after the other, so some steps mean nothing; a line that climbs stands still.",
            Query(f"topk(10, {_NEWEST} - on ({BY_JOB}) group_right () {_STEP})", RANK_LEGEND),
        ),
        graph(
            "GPU busy by rank",
            "Share of time in which a kernel ran on the rank's GPU, the ten least busy. One low "
            "line: that rank's host or data; all low: the job waits.",
            Query(f"bottomk(10, {BUSY_OF_RANKS})", RANK_LEGEND),
            unit="percentunit",
            maximum=1,
            limits=at_least(GPU_BUSY),
            links=[links.node_of_series()],
        ),
        _where_ranks_run(),
    ],
)


_ALLOCATED = series("rank_memory_allocated_bytes", JOB)
_RESERVED = series("rank_memory_reserved_bytes", JOB)
_SPLIT = series("rank_memory_inactive_split_bytes", JOB)
_RETRIES = total(RANK_KEY, grown(series("rank_allocation_retries_total", JOB), WINDOW))
_OUT_OF_MEMORY = total(RANK_KEY, grown(series("rank_out_of_memory_errors_total", JOB), WINDOW))
_MEMORY_ROW = Row(
    "Memory",
    [
        graph(
            "GPU memory by rank",
            "Memory in use on a rank's GPU by what it has, the ten fullest. Aim below 90 %. Ranks "
            "that differ have uneven work.",
            Query(f"topk(10, {MEMORY_OF_RANKS})", RANK_LEGEND),
            unit="percentunit",
            maximum=1,
            limits=at_most(MEMORY),
        ),
        graph(
            "Allocated by rank",
            "What tensors take of the GPU's memory, the ten ranks with the most. It saws with the "
            "steps; a floor that climbs from step to step is a leak.",
            Query(f"topk(10, {_ALLOCATED})", RANK_LEGEND),
            unit="bytes",
        ),
        graph(
            "Reserved by rank",
            "What the allocator holds, the ten ranks with the most. Far above what is allocated: "
            "a cache that others cannot use.",
            Query(f"topk(10, {_RESERVED})", RANK_LEGEND),
            unit="bytes",
        ),
        graph(
            "Fragmentation by rank",
            "Free pieces of blocks that are partly in use, as a share of what is reserved, the "
            "ten highest. A rise ends in allocations that fail though memory is free.",
            Query(f"topk(10, {_SPLIT} / {_RESERVED})", RANK_LEGEND),
            unit="percentunit",
        ),
        graph(
            "Allocation retries",
            "Allocations that failed first and were tried again after the cache was given back. "
            f"Each costs milliseconds; the next step is out of memory. {EMPTY_WHEN_HEALTHY}",
            Query(_RETRIES, RANK_LEGEND),
            width=12,
        ),
        graph(
            "Out of memory",
            f"Out-of-memory errors of the rank's allocator. {EMPTY_WHEN_HEALTHY}",
            Query(_OUT_OF_MEMORY, RANK_LEGEND),
            width=12,
        ),
    ],
    width=6,
)
