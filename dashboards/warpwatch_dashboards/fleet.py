"""*Fleet*: all nodes, what is wrong now, and what is wasted."""

from __future__ import annotations

from warpwatch_dashboards import links, marks, variables
from warpwatch_dashboards.job_queries import BY_JOB, lateness
from warpwatch_dashboards.page import Page, Row
from warpwatch_dashboards.panels import EMPTY_WHEN_HEALTHY, at_least, at_most, bars, graph, number
from warpwatch_dashboards.queries import (
    AGENT,
    NODE_LEGEND,
    PLACE,
    RANK_LEGEND,
    Query,
    allocations,
    grown,
    of_allocations,
    of_workloads,
    rate,
    series,
    total,
)
from warpwatch_dashboards.tables import Column, table

# A MIG GPU is counted once: its instances are devices of their own.
WHOLE = 'gpu_instance=""'
IDLE_RATIO, MOSTLY_IDLE_RATIO = 0.05, 0.5
BUSY = rate(series("device_busy_seconds_total"))
IDLE_OVER_TIME = f"1 - {rate(series('device_busy_seconds_total'), '$__range')}"


def page() -> Page:
    return Page(
        uid=links.FLEET,
        title="Warpwatch / Fleet",
        description="All nodes: their health, what is wrong now, stragglers, waste and energy.",
        variables=[
            variables.datasource(),
            variables.cluster(),
            variables.node(),
            variables.instance(),
            variables.namespace(),
        ],
        annotations=marks.of_agents(),
        rows=[_NOW_ROW, _WRONG_ROW, _NODES_ROW, _WASTE_ROW, _ENERGY_ROW],
    )


_UP = series("device_up", AGENT, WHOLE)
_IDLE = of_workloads(f"{BUSY} < bool {IDLE_RATIO}")
_NOW_ROW = Row(
    "Now",
    [
        number(
            "Nodes",
            "Agents that Prometheus reads. A fall is a node that is down or an agent that is: "
            "see Warpwatch itself.",
            "none",
            Query(f"count({series('build_info')})"),
        ),
        number(
            "GPUs",
            "GPUs that the agents see, those that cannot be read included.",
            "none",
            Query(f"count({_UP})"),
        ),
        number(
            "GPUs lost",
            "GPUs that cannot be read now: fallen off the bus, stuck in the driver, in need of a "
            "reset. Anything above 0 needs attention.",
            "none",
            Query(f"sum({_UP} == bool 0)"),
            limits=at_most(1, 1),
        ),
        number(
            "Active anomalies",
            "What is wrong now, of all kinds. The table below names each.",
            "none",
            Query(f"sum({series('anomaly_active')})"),
            limits=at_most(1),
        ),
        number(
            "Training jobs",
            "Jobs that the agents see. 0: no training runs, or the shim is not in the job.",
            "none",
            Query(f"count(group by ({BY_JOB}) ({series('job_ranks')})) or vector(0)"),
        ),
        number(
            "Idle though allocated",
            "GPUs that belong to a container and on which no kernel runs. Somebody pays for them. "
            "MIG instances have no counter of busy time and are not among them.",
            "none",
            Query(f"sum({_IDLE}) or vector(0)"),
            limits=at_most(1),
        ),
    ],
)


_BY_KIND = total("kind", series("anomaly_active"))
_XIDS = total(f"{PLACE}, gpu, xid", grown(series("device_xid_errors_total"), "$__range"))
_WRONG_ROW = Row(
    "What is wrong",
    [
        table(
            "Anomalies now",
            "Each anomaly that is active, and the job, rank or GPU that it is about. The "
            f"agent's page has its evidence and its capture. {EMPTY_WHEN_HEALTHY}",
            [Column(f"{series('anomaly_info')} == 1")],
            hidden=["__name__", "job", "uuid"],
            width=16,
            links=[links.node_of_row(), links.job_of_row()],
        ),
        graph(
            "Anomalies by kind",
            "How many were active at a time. One kind on many nodes at once has one cause: "
            f"network, storage, power. {EMPTY_WHEN_HEALTHY}",
            "none",
            Query(f"{_BY_KIND} > 0", "{{kind}}"),
            stacked=True,
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
        graph(
            "Stragglers across nodes",
            "The ten latest ranks: their own time of a step, without the wait for others, "
            "checkpoints and evaluation, over the median of their job's ranks on all nodes, less "
            "1. One that stays above 10 % holds its whole job up.",
            "percentunit",
            Query(f"topk(10, {lateness(AGENT)})", f"{RANK_LEGEND}"),
            limits=at_most(0.1, 0.25),
            links=[links.job_of_series()],
        ),
    ],
)


_USED = total(PLACE, series("device_memory_used_bytes", AGENT, WHOLE))
_WHOLE = total(PLACE, series("device_memory_total_bytes", AGENT, WHOLE))
_HOTTEST = series("device_temperature_celsius", AGENT, 'sensor="gpu"')
_NODES_ROW = Row(
    "Nodes",
    [
        table(
            "Nodes",
            "One line a node: how much of it works, how hot it is, what is wrong. A click leads "
            "to its GPUs.",
            [
                Column(f"max by ({PLACE}, version) ({series('build_info')})"),
                Column(f"count by ({PLACE}) ({series('device_up', AGENT, WHOLE)})", "GPUs"),
                Column(f"avg by ({PLACE}) ({BUSY})", "GPU busy", "percentunit", at_least(0.8)),
                Column(f"{_USED} / {_WHOLE}", "Memory", "percentunit", at_most(0.9)),
                Column(total(PLACE, series("device_power_watts")), "Power", "watt"),
                Column(f"max by ({PLACE}) ({_HOTTEST})", "Hottest GPU", "celsius"),
                Column(total(PLACE, series("anomaly_active")), "Anomalies", "none", at_most(1)),
            ],
            width=24,
            links=[links.node_of_row()],
        ),
        graph(
            "GPU busy by node",
            "Share of time in which a kernel ran, averaged over a node's GPUs, the ten least busy "
            "nodes. Below 80 % the GPUs wait: for data, for the host, for other ranks.",
            "percentunit",
            Query(f"bottomk(10, avg by ({PLACE}) ({BUSY}))", NODE_LEGEND),
            minimum=0,
            maximum=1,
            limits=at_least(0.8),
            links=[links.node_of_series()],
            width=12,
        ),
        graph(
            "GPU memory by node",
            "Memory in use by what the GPUs have, the ten fullest nodes. Above 90 % the next "
            "large batch fails.",
            "percentunit",
            Query(f"topk(10, {_USED} / {_WHOLE})", NODE_LEGEND),
            minimum=0,
            maximum=1,
            limits=at_most(0.9),
            links=[links.node_of_series()],
            width=12,
        ),
    ],
)


_OWNER = "cluster, namespace"
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
            width=12,
            links=[links.node_of_row()],
        ),
        graph(
            "Idle GPUs by namespace",
            "Idle shares of the GPUs that a namespace holds, added up: so many of them are too "
            "many. (free): GPUs that no workload holds.",
            "none",
            Query(_IDLE_GPUS, "{{namespace}}"),
            stacked=True,
            width=6,
        ),
        graph(
            "GPUs by namespace",
            "GPUs and MIG instances that containers hold, by namespace; (free): that none does.",
            "none",
            Query(total(_OWNER, allocations()), "{{namespace}}"),
            stacked=True,
            width=6,
        ),
    ],
)


_JOULES = series("device_energy_joules_total", AGENT, WHOLE)
_BY_JOB = total(BY_JOB, f"increase({series('job_energy_joules_total')}[$__range])")
_ENERGY_ROW = Row(
    "Energy",
    [
        graph(
            "Power by node",
            "What the GPUs of a node draw, from their energy counters, the ten nodes that draw "
            "most. Without host and cooling.",
            "watt",
            Query(f"topk(10, {total(PLACE, rate(_JOULES))})", NODE_LEGEND),
            minimum=0,
            links=[links.node_of_series()],
            width=12,
        ),
        number(
            "GPU energy",
            "Energy that all GPUs used in the time shown. 3.6 MJ are 1 kWh.",
            "joule",
            Query(f"sum(increase({_JOULES}[$__range]))"),
            height=8,
        ),
        bars(
            "Energy by job",
            "GPU energy that each job used in the time shown, while its ranks ran: the ten that "
            "used most.",
            "joule",
            Query(f"topk(10, {_BY_JOB})", "{{training_job}}"),
            links=[links.job_of_series()],
        ),
    ],
)
