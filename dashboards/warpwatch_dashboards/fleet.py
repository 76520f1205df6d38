"""*Fleet*: all nodes, what is wrong now, and what is wasted."""

from __future__ import annotations

from warpwatch_dashboards import links, variables
from warpwatch_dashboards.page import Page, Row
from warpwatch_dashboards.panels import (
    EMPTY_WHEN_HEALTHY,
    Column,
    at_least,
    at_most,
    bars,
    graph,
    heat_map,
    number,
    table,
)
from warpwatch_dashboards.queries import (
    AGENT,
    BY_JOB,
    NO_FLEET,
    NODE_LEGEND,
    PLACE,
    RANK_LEGEND,
    Query,
    allocations,
    anomalies,
    at_nodes,
    grown,
    lateness,
    of_allocations,
    of_workloads,
    rate,
    recorded,
    series,
    total,
)

# A MIG GPU is counted once: its instances are devices of their own.
WHOLE = 'gpu_instance=""'
MOSTLY_IDLE_RATIO = 0.5
BUSY = rate(series("device_busy_seconds_total"))
IDLE_OVER_TIME = f"1 - {rate(series('device_busy_seconds_total'), '$__range')}"


def _hours(gpus: str) -> str:
    """Return the hours of a count over the time range."""
    return f"sum_over_time(({gpus})[$__range:$__interval]) * $__interval_ms / 3.6e6"


_OWNER, _HOLDER = "cluster, namespace", "cluster, $holder"
_DEVICE_UP, _UNUSED = series("device_up"), f"1 - {BUSY}"
# Without the node, which an anomaly has on bare hosts too, where the device's series lack it.
_BY_UUID = "cluster, instance, uuid"
_CRITICAL = series("anomaly_info", AGENT, 'scope="hardware",severity="critical",uuid!=""')
_BROKEN = f"group by ({_BY_UUID}) ({_CRITICAL} or {_DEVICE_UP} == 0)"
_IDLE_NOW = f"{_UNUSED} unless on ({_BY_UUID}) {_BROKEN}"
# A device that cannot be read has no counter of busy time.
_LOST = f"({_UNUSED} and on ({_BY_UUID}) {_BROKEN}) or {_DEVICE_UP} == bool 0"
_WASTED = f"{_UNUSED} or {_DEVICE_UP} == bool 0"
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
                Column(_hours(total(_HOLDER, of_allocations(_IDLE_NOW))), "Idle", "h"),
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


def page() -> Page:
    return Page(
        uid=links.FLEET,
        title="Warpwatch / Fleet",
        description="All nodes: their health, what is wrong now, stragglers, waste and energy.",
        variables=[
            *variables.of_agents(),
            variables.namespace(),
            variables.holder(),
            *variables.prices(),
        ],
        annotations=variables.marks_of_agents(),
        rows=[_NOW_ROW, _WRONG_ROW, _NODES_ROW, *USE_ROWS],
    )


_AGENTS = series("build_info", AGENT, NO_FLEET)
_UP = series("device_up", AGENT, WHOLE)
_NODE_BUSY = recorded("node:device_busy:ratio_rate5m", f"avg by ({PLACE}) ({BUSY})")
IDLE_RATIO = 0.05
_IDLE = of_workloads(f"{BUSY} < bool {IDLE_RATIO}")
_NOW_ROW = Row(
    "Now",
    [
        number(
            "Nodes",
            "Agents that Prometheus reads. A fall is a node that is down or an agent that is: "
            "see Warpwatch itself.",
            Query(f"count({_AGENTS})"),
            width=3,
        ),
        number(
            "GPUs",
            "GPUs that the agents see, those that cannot be read included.",
            Query(f"count({_UP})"),
            width=3,
        ),
        number(
            "GPUs lost",
            "GPUs that cannot be read now: fallen off the bus, stuck in the driver, in need of a "
            "reset. Anything above 0 needs attention.",
            Query(f"sum({_UP} == bool 0)"),
            limits=at_most(1, 1),
            width=3,
        ),
        number(
            "Active anomalies",
            "What is wrong now, of all kinds. The table below names each.",
            Query(f"sum({series('anomaly_active')})"),
            limits=at_most(1),
            width=3,
        ),
        number(
            "GPU busy",
            "Share of time in which a kernel ran, over all GPUs: how much of what is owned works.",
            Query(f"avg({_NODE_BUSY})"),
            unit="percentunit",
            limits=at_least(0.8),
            width=3,
        ),
        number(
            "Tensor cores active",
            "Share of cycles in which tensor cores worked, over all GPUs that have the counter. "
            "High GPU busy and little of this: kernels run that do little.",
            Query(f"avg({series('device_tensor_active_ratio')})"),
            unit="percentunit",
            width=3,
        ),
        number(
            "Training jobs",
            "Jobs that the agents see. 0: no training runs, or the shim is not in the job.",
            Query(f"count(group by ({BY_JOB}) ({series('job_ranks')})) or vector(0)"),
            width=3,
        ),
        number(
            "Idle though allocated",
            "GPUs that belong to a container and on which no kernel runs. Somebody pays for them. "
            "MIG instances have no counter of busy time and are not among them.",
            Query(f"sum({_IDLE}) or vector(0)"),
            limits=at_most(1),
            width=3,
        ),
    ],
)


_OF_HARDWARE = 'scope="hardware"'
_TO_SERVE = 'kind="device_needs_service"'
_BY_KIND = total("kind", series("anomaly_active"))
_XIDS = total(f"{PLACE}, gpu, xid", grown(series("device_xid_errors_total"), "$__range"))
# Every ten minutes, for which an event stays active: all scrapes of a month are too many to count.
_MONTH = "[30d:10m]"
_HARDWARE = f"{series('anomaly_info', AGENT, _OF_HARDWARE)}{_MONTH}"
_ILL = total(f"{PLACE}, uuid, kind", f"count_over_time({_HARDWARE})")
_SEEN = f"max by (cluster, instance) (count_over_time({_AGENTS}{_MONTH}))"
_AILING = f"{_ILL} / on (cluster, instance) group_left () {_SEEN}"
_WRONG_ROW = Row(
    "What is wrong",
    [
        table(
            "Anomalies now",
            "Each anomaly that is active, and the job, rank or GPU that it is about. The "
            f"agent's page has its evidence and its capture. {EMPTY_WHEN_HEALTHY}",
            [Column(f"{anomalies()} == 1")],
            hidden=["__name__", "job", "uuid", "link"],
            width=16,
            links=[links.node_of_row(), links.job_of_row()],
        ),
        graph(
            "Anomalies by kind",
            "How many were active at a time. One kind on many nodes at once has one cause: "
            f"network, storage, power. {EMPTY_WHEN_HEALTHY}",
            Query(f"{_BY_KIND} > 0", "{{kind}}"),
            stacked=True,
            width=8,
        ),
        table(
            "GPUs that need service",
            "GPUs that need a reset, a reboot or a replacement by the driver or an XID, until they "
            f"are healthy after it. {EMPTY_WHEN_HEALTHY}",
            [Column(f"{series('anomaly_info', AGENT, _TO_SERVE)} == 1")],
            hidden=["__name__", "job", "kind", "scope", "severity", "link"],
            width=24,
            links=[links.node_of_row()],
        ),
        table(
            "GPUs lost",
            "GPUs that cannot be read, and why: lost (off the bus), stuck (the driver does not "
            f"return), reset_required, no_permission, driver. {EMPTY_WHEN_HEALTHY}",
            [Column(f"{series('device_up')} == 0")],
            hidden=["__name__", "job"],
            links=[links.node_of_row()],
        ),
        table(
            "XID errors",
            "What the driver reported in the time shown, by XID: docs/xids.md says what each "
            f"means and whether to drain the node. {EMPTY_WHEN_HEALTHY}",
            [Column(_XIDS, "Times")],
            links=[links.node_of_row()],
        ),
        table(
            "Broken again and again",
            "Share of the last 30 days in which a GPU or a port had an anomaly of the hardware, by "
            f"kind, the ten with most. Have these replaced. {EMPTY_WHEN_HEALTHY}",
            [Column(f"topk(10, {_AILING})", "Of the time", "percentunit", at_most(0.001, 0.03))],
            links=[links.node_of_row()],
        ),
        graph(
            "Stragglers across nodes",
            "The ten latest ranks: their own time of a step, without the wait for others, "
            "checkpoints and evaluation, over the median of their job's ranks on all nodes, less "
            "1. One that stays above 10 % holds its whole job up.",
            Query(f"topk(10, {lateness(AGENT)})", f"{RANK_LEGEND}"),
            unit="percentunit",
            limits=at_most(0.1, 0.25),
            links=[links.job_of_series()],
        ),
    ],
    width=12,
)


_USED = total(PLACE, series("device_memory_used_bytes", AGENT, WHOLE))
_WHOLE = total(PLACE, series("device_memory_total_bytes", AGENT, WHOLE))
_HOTTEST = series("device_temperature_celsius", AGENT, 'sensor="gpu"')
_ACTIVE = f"{series('anomaly_active', AGENT, NO_FLEET)} or {at_nodes('anomaly_active')}"
_ANOMALIES = f"{total(PLACE, _ACTIVE)} and on ({PLACE}) {_AGENTS}"
_NODES_ROW = Row(
    "Nodes",
    [
        table(
            "Nodes",
            "One line a node: how much of it works, how hot it is, what is wrong. A click leads "
            "to its GPUs.",
            [
                Column(f"max by ({PLACE}, version) ({_AGENTS})"),
                Column(f"count by ({PLACE}) ({series('device_up', AGENT, WHOLE)})", "GPUs"),
                Column(f"avg by ({PLACE}) ({BUSY})", "GPU busy", "percentunit", at_least(0.8)),
                Column(f"{_USED} / {_WHOLE}", "Memory", "percentunit", at_most(0.9)),
                Column(total(PLACE, series("device_power_watts")), "Power", "watt"),
                Column(f"max by ({PLACE}) ({_HOTTEST})", "Hottest GPU", "celsius"),
                Column(_ANOMALIES, "Anomalies", "none", at_most(1)),
            ],
            width=24,
            links=[links.node_of_row()],
        ),
        heat_map(
            "GPU busy by node",
            "Share of time in which a kernel ran, averaged over a node's GPUs. Below 80 % the GPUs "
            "wait: for data, for the host, for other ranks.",
            Query(_NODE_BUSY, NODE_LEGEND),
            unit="percentunit",
        ),
        graph(
            "GPU memory by node",
            "Memory in use by what the GPUs have, the ten fullest nodes. Above 90 % the next "
            "large batch fails.",
            Query(f"topk(10, {_USED} / {_WHOLE})", NODE_LEGEND),
            unit="percentunit",
            maximum=1,
            limits=at_most(0.9),
            links=[links.node_of_series()],
        ),
    ],
    width=12,
)
