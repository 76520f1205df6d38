"""*Training job*: how fast it is, where its time goes, which rank holds it up, what it costs."""

from __future__ import annotations

from warpwatch_dashboards import links, marks, variables
from warpwatch_dashboards.job_queries import (
    BUSY_OF_RANKS,
    BY_JOB,
    COMMUNICATION,
    DATA_LOADING,
    GPU_BUSY,
    JOB_LEGEND,
    MEMORY,
    MEMORY_OF_RANKS,
    STEPS_PER_SECOND,
    in_order,
    mean_of_steps,
    quantile_of_steps,
    share_of_steps,
    step_s,
)
from warpwatch_dashboards.page import Page, Row
from warpwatch_dashboards.panels import (
    EMPTY_WHEN_HEALTHY,
    at_least,
    at_most,
    bars,
    graph,
    heat_map,
    number,
)
from warpwatch_dashboards.queries import JOB, RANK_KEY, RANK_LEGEND, Query, rate, series, total
from warpwatch_dashboards.tables import Column, table
from warpwatch_dashboards.training_job_ranks import RANK_ROWS


def page() -> Page:
    return Page(
        uid=links.TRAINING_JOB,
        title="Warpwatch / Training job",
        description="One job over all its nodes: speed, phases, stragglers, memory, energy.",
        variables=[
            variables.datasource(),
            variables.cluster(),
            variables.node(),
            variables.instance(),
            variables.namespace(),
            variables.job(),
        ],
        annotations=marks.of_jobs(),
        rows=[_TARGETS_ROW, _STEPS_ROW, _PHASES_ROW, *RANK_ROWS, _ENERGY_ROW, _REASONS_ROW],
    )


_SAID = series("job_world_size", JOB)
_RUNNING = total(BY_JOB, series("rank_up", JOB))
_TARGETS_ROW = Row(
    "Targets",
    [
        number(
            "Ranks that run",
            "Share of the job's world size that lives now, over all nodes. Less: a node is not "
            "watched, or ranks died.",
            "percentunit",
            Query(f"{_RUNNING} / max by ({BY_JOB}) ({_SAID})", JOB_LEGEND),
            limits=at_least(1),
        ),
        number(
            "Goodput",
            "Share of its ranks' time in finished steps, without waiting for data, checkpoints, "
            "evaluation, hangs and restarts: docs/alerts.md. Needs the recording rules.",
            "percentunit",
            Query(f"warpwatch:job:goodput:ratio_rate10m and on ({BY_JOB}) {_RUNNING}", JOB_LEGEND),
            limits=at_least(0.8),
        ),
        number(
            "GPU busy",
            "Share of time in which a kernel ran on the job's GPUs. Aim above 80 %: below, they "
            "wait for data, for the host or for each other.",
            "percentunit",
            Query(f"avg by ({BY_JOB}) ({BUSY_OF_RANKS})", JOB_LEGEND),
            limits=at_least(GPU_BUSY),
        ),
        number(
            "GPU memory",
            "Memory in use on the fullest of the job's GPUs. Aim below 90 %: above, allocations "
            "are retried and the next large batch fails.",
            "percentunit",
            Query(f"max by ({BY_JOB}) ({MEMORY_OF_RANKS})", JOB_LEGEND),
            limits=at_most(MEMORY),
        ),
        number(
            "Communication",
            "Share of the steps' time that ranks wait for others; communication hidden behind "
            "compute is not in it. Aim below 20 %. High on all but one rank: that one is late.",
            "percentunit",
            Query(share_of_steps("comm"), JOB_LEGEND),
            limits=at_most(COMMUNICATION),
        ),
        number(
            "Data loading",
            "Share of the steps' time that ranks wait for the next batch. Aim below 10 %: more "
            "loader workers, faster storage, less work a sample.",
            "percentunit",
            Query(share_of_steps("data_wait"), JOB_LEGEND),
            limits=at_most(DATA_LOADING),
        ),
    ],
)


_STEPS_ROW = Row(
    "Speed",
    [
        graph(
            "Step time",
            "The mean over the steps of all ranks, and percentiles, which move from bucket to "
            "bucket. A mean that rises by a few per cent and stays is a regression; p99 alone "
            "rises with checkpoints, evaluation and lone slow steps.",
            "s",
            Query(mean_of_steps(), f"{JOB_LEGEND} mean"),
            Query(quantile_of_steps(0.5), f"{JOB_LEGEND} p50"),
            Query(quantile_of_steps(0.99), f"{JOB_LEGEND} p99"),
            minimum=0,
            width=12,
        ),
        heat_map(
            "Step time by rank",
            "Mean step time of each rank. In synchronous training all ranks change together: who "
            "is the cause is seen in their own time, below.",
            "s",
            Query(in_order(step_s()), RANK_LEGEND),
            width=12,
        ),
        graph(
            "Steps",
            "Steps a second. 0 is a hang, a long checkpoint or an evaluation.",
            "si:steps/s",
            Query(STEPS_PER_SECOND, JOB_LEGEND),
            minimum=0,
        ),
        graph(
            "Samples",
            "Samples a second over all ranks, of jobs that tell them.",
            "si:samples/s",
            Query(total(BY_JOB, rate(series("samples_total", JOB))), JOB_LEGEND),
            minimum=0,
        ),
        graph(
            "Tokens",
            "Tokens a second over all ranks, of jobs that tell them: the rate to compare runs by.",
            "si:tokens/s",
            Query(total(BY_JOB, rate(series("tokens_total", JOB))), JOB_LEGEND),
            minimum=0,
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
_PHASES_ROW = Row(
    "Where the time goes",
    [
        graph(
            "Phases of a step",
            "Seconds of a mean step by phase, one upon the other; other is what no phase tells. "
            "The phase that grew with the step time is where to look.",
            "s",
            Query(_PHASES, f"{JOB_LEGEND} {{{{phase}}}}"),
            Query(_OTHER, f"{JOB_LEGEND} other"),
            stacked=True,
            minimum=0,
            width=16,
        ),
        graph(
            "Garbage collection",
            "Share of time in Python's garbage collector, the ten ranks with the most. Ranks that "
            "collect at different times make all others wait: collect on all at the same step.",
            "percentunit",
            Query(f"topk(10, {_COLLECTING})", RANK_LEGEND),
            minimum=0,
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
            "watt",
            Query(_POWER, JOB_LEGEND),
            minimum=0,
            width=6,
        ),
        graph(
            "Energy per step",
            "GPU energy of all ranks for one step. The same model in the same setting costs the "
            "same: a rise is waste.",
            "joule",
            Query(f"{_POWER} / {STEPS_PER_SECOND}", JOB_LEGEND),
            minimum=0,
            width=6,
        ),
        graph(
            "Energy per token",
            "GPU energy for one token, of jobs that tell tokens: the figure to compare hardware "
            "and settings by.",
            "joule",
            Query(f"{_POWER} / {_TOKENS}", JOB_LEGEND),
            minimum=0,
            width=6,
        ),
        number(
            "GPU energy",
            "Energy that the job's GPUs used in the time shown. 3.6 MJ are 1 kWh.",
            "joule",
            Query(
                total(BY_JOB, f"increase({series('job_energy_joules_total', JOB)}[$__range])"),
                JOB_LEGEND,
            ),
            width=6,
            height=8,
        ),
    ],
)


_SHARES = f"max by ({BY_JOB}, finding) ({series('diagnosis_share_ratio', JOB)})"
_ANOMALIES = f"{series('anomaly_info', JOB)} == 1"
_LOST = total(BY_JOB, rate(series("records_lost_total", JOB)))
_REASONS_ROW = Row(
    "Why",
    [
        bars(
            "Newest diagnosis",
            "Share of the steps that each finding of the newest capture's diagnosis explains. "
            "The report, linked from the marks in the graphs, says what to do about it. "
            f"{EMPTY_WHEN_HEALTHY}",
            "percentunit",
            Query(_SHARES, f"{JOB_LEGEND} {{{{finding}}}}"),
            minimum=0,
            maximum=1,
        ),
        table(
            "Anomalies now",
            "What is wrong with the job now. The agent's page has the evidence and the capture. "
            f"{EMPTY_WHEN_HEALTHY}",
            [Column(_ANOMALIES)],
            hidden=["__name__", "job", "gpu", "uuid"],
            links=[links.node_of_row()],
        ),
        graph(
            "After captures",
            "Median step after a job's newest capture by the median before it. Above 1.05: "
            f"something of the capture stayed. {EMPTY_WHEN_HEALTHY}",
            "none",
            Query(f"max by ({BY_JOB}) ({series('capture_residual_ratio', JOB)})", JOB_LEGEND),
            limits=at_most(1.05),
            width=4,
        ),
        graph(
            "Records lost",
            "Records of steps that the agent could not read in time. Totals and averages here "
            "stay right; detectors see fewer steps.",
            "si:records/s",
            Query(_LOST, JOB_LEGEND),
            minimum=0,
            width=4,
        ),
    ],
)
