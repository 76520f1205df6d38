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
    RUNNING,
    STEPS_PER_SECOND,
    share_of_steps,
    share_of_time,
)
from warpwatch_dashboards.page import Page, Row
from warpwatch_dashboards.panels import EMPTY_WHEN_HEALTHY, at_least, at_most, bars, graph, number
from warpwatch_dashboards.queries import JOB, Query, rate, series, total
from warpwatch_dashboards.tables import Column, table
from warpwatch_dashboards.training_job_ranks import RANK_ROWS
from warpwatch_dashboards.training_job_time import TIME_ROWS


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
        annotations=marks.of_jobs(),
        rows=[_TARGETS_ROW, *TIME_ROWS, *RANK_ROWS, _ENERGY_ROW, _REASONS_ROW],
    )


_FLOPS = f"max by ({BY_JOB}, method) ({series('job_model_flops_ratio', JOB)})"
_SAID = series("job_world_size", JOB)
_TARGETS_ROW = Row(
    "Targets",
    [
        number(
            "Ranks that run",
            "Share of the job's world size that lives now, over all nodes. Less: a node is not "
            "watched, or ranks died.",
            Query(f"{RUNNING} / max by ({BY_JOB}) ({_SAID})", JOB_LEGEND),
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
            Query(_SHARES, f"{JOB_LEGEND} {{{{finding}}}}"),
            unit="percentunit",
            minimum=0,
            maximum=1,
        ),
        table(
            "Anomalies now",
            "What is wrong with the job now. The agent's page has the evidence and the capture. "
            f"{EMPTY_WHEN_HEALTHY}",
            [Column(_ANOMALIES)],
            hidden=["__name__", "job", "gpu", "uuid", "link"],
            links=[links.node_of_row()],
        ),
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
            Query(_LOST, JOB_LEGEND),
            unit="si:records/s",
            width=4,
        ),
    ],
)
