"""The rows of *Fleet* about who holds and uses GPUs, and what it costs."""

from __future__ import annotations

from warpwatch_dashboards import links
from warpwatch_dashboards.job_queries import BY_JOB
from warpwatch_dashboards.page import Row
from warpwatch_dashboards.panels import EMPTY_WHEN_HEALTHY, at_most, bars, graph, number
from warpwatch_dashboards.queries import (
    AGENT,
    NODE_LEGEND,
    PLACE,
    Query,
    allocations,
    of_allocations,
    of_workloads,
    rate,
    series,
    total,
)
from warpwatch_dashboards.tables import Column, table

# A MIG GPU is counted once: its instances are devices of their own.
WHOLE = 'gpu_instance=""'
MOSTLY_IDLE_RATIO = 0.5
BUSY = rate(series("device_busy_seconds_total"))
IDLE_OVER_TIME = f"1 - {rate(series('device_busy_seconds_total'), '$__range')}"


def _hours(gpus: str) -> str:
    """Of how many there were, over the time shown."""
    return f"sum_over_time(({gpus})[$__range:$__interval]) * $__interval_ms / 3.6e6"


_OWNER, _HOLDER = "cluster, namespace", "cluster, $holder"
_UP, _UNUSED = series("device_up"), f"1 - {BUSY}"
# Without the node, which an anomaly has on bare hosts too, where the device's series lack it.
_BY_UUID = "cluster, instance, uuid"
_CRITICAL = series("anomaly_info", AGENT, 'scope="hardware",severity="critical",uuid!=""')
_BROKEN = f"group by ({_BY_UUID}) ({_CRITICAL} or {_UP} == 0)"
_IDLE = f"{_UNUSED} unless on ({_BY_UUID}) {_BROKEN}"
# A device that cannot be read has no counter of busy time.
_LOST = f"({_UNUSED} and on ({_BY_UUID}) {_BROKEN}) or {_UP} == bool 0"
_WASTED = f"{_UNUSED} or {_UP} == bool 0"
_IDLE_GPUS = total(_OWNER, of_allocations(f"1 - {BUSY}"))
_WASTE_ROW = Row(
    "Use and waste",
    [
        table(
            "Mostly idle though allocated",
            "Containers whose GPU ran nothing for most of the time shown, the worst first. Ask "
            f"their owners, or give the GPU to others. {EMPTY_WHEN_HEALTHY}",
            [
                Column(
                    f"topk(20, {of_workloads(IDLE_OVER_TIME)} > {MOSTLY_IDLE_RATIO})",
                    "Idle",
                    "percentunit",
                    at_most(MOSTLY_IDLE_RATIO, 0.9),
                )
            ],
            hidden=["job"],
            links=[links.node_of_row()],
        ),
        table(
            "GPU hours",
            "GPU hours that a namespace (of Slurm: a user), or a Slurm account or partition as "
            "chosen above, held in the time shown; (free): nobody held them. Used: kernels ran. "
            "Lost: none ran, and the GPU could not be read or had a critical fault. Idle: none ran "
            "on a healthy GPU. Cost: of idle and lost hours, by the price of a GPU hour that is "
            "set above. MIG instances have no counter of busy time: only held and lost.",
            [
                Column(_hours(total(_HOLDER, allocations())), "Held", "h"),
                Column(_hours(total(_HOLDER, of_allocations(BUSY))), "Used", "h"),
                Column(_hours(total(_HOLDER, of_allocations(_IDLE))), "Idle", "h"),
                Column(_hours(total(_HOLDER, of_allocations(_LOST))), "Lost", "h"),
                Column(f"{_hours(total(_HOLDER, of_allocations(_WASTED)))} * $gpu_price", "Cost"),
            ],
        ),
        graph(
            "Idle GPUs by namespace",
            "Idle shares of the GPUs that a namespace holds, added up: so many of them are too "
            "many. (free): GPUs that no workload holds.",
            Query(_IDLE_GPUS, "{{namespace}}"),
            stacked=True,
        ),
        graph(
            "GPUs by namespace",
            "GPUs and MIG instances that containers hold, by namespace; (free): that none does.",
            Query(total(_OWNER, allocations()), "{{namespace}}"),
            stacked=True,
        ),
    ],
    width=12,
)


_RANKS = f"last_over_time({series('rank_up')}[$__range])"
_FLOPS = f"avg_over_time({series('job_model_flops_ratio')}[$__range])"
_GOODPUT = "avg_over_time(warpwatch:job:goodput:ratio_rate10m[$__range])"
_JOBS_ROW = Row(
    "Jobs by MFU and goodput",
    [
        table(
            "Jobs by MFU and goodput",
            "Jobs of the time shown, the lowest goodput first; a click on a column's head ranks by "
            "it. Goodput: mean share of the ranks' time in finished steps, without waiting for "
            "data, checkpoints and evaluation (docs/alerts.md; needs the recording rules). MFU: "
            "mean FLOPs that the model needs by what the GPUs could do, of jobs of which it is "
            "known; methods do not compare with each other.",
            [
                Column(f"count by ({BY_JOB}) ({_RANKS})", "Ranks"),
                Column(f"{_GOODPUT} and on ({BY_JOB}) {_RANKS}", "Goodput", "percentunit"),
                Column(f"avg by ({BY_JOB}, method) ({_FLOPS})", "MFU", "percentunit"),
            ],
            width=24,
            sorted_by="Goodput",
            links=[links.job_of_row()],
        )
    ],
)


_JOULES = series("device_energy_joules_total", AGENT, WHOLE)
_KWH = f"sum(increase({_JOULES}[$__range])) / 3.6e6"
_BY_JOB = total(BY_JOB, f"increase({series('job_energy_joules_total')}[$__range])")
_ENERGY_ROW = Row(
    "Energy",
    [
        graph(
            "Power by node",
            "What the GPUs of a node draw, from their energy counters, the ten nodes that draw "
            "most. Without host and cooling.",
            Query(f"topk(10, {total(PLACE, rate(_JOULES))})", NODE_LEGEND),
            unit="watt",
            links=[links.node_of_series()],
        ),
        number(
            "GPU energy",
            "Energy that all GPUs used in the time shown, without host and cooling.",
            Query(_KWH),
            unit="kwatth",
            width=4,
            height=8,
        ),
        number(
            "Cost of energy",
            "By the price of a kilowatt-hour that is set above, in its currency.",
            Query(f"{_KWH} * $price"),
            width=4,
            height=8,
        ),
        bars(
            "Energy by job",
            "GPU energy that each job used in the time shown, while its ranks ran: the ten that "
            "used most.",
            Query(f"topk(10, {_BY_JOB})", "{{training_job}}"),
            unit="joule",
            links=[links.job_of_series()],
        ),
    ],
)


USE_ROWS = [_WASTE_ROW, _JOBS_ROW, _ENERGY_ROW]
