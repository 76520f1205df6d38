"""*Fleet*: all nodes, what is wrong now, and what is wasted.

Its graphs and numbers are the lines of fleet_panels.csv.
"""

from __future__ import annotations

from grafana_foundation_sdk.models import dashboard as models

from warpwatch_dashboards import links, variables
from warpwatch_dashboards.page import Page, Row
from warpwatch_dashboards.panel_table import read_panels
from warpwatch_dashboards.panels import EMPTY_WHEN_HEALTHY, Column, at_least, at_most, table
from warpwatch_dashboards.queries import (
    AGENT,
    ALLOCATIONS,
    BY_JOB,
    NO_FLEET,
    PLACE,
    anomalies,
    at_nodes,
    grown,
    of_allocations,
    of_workloads,
    rate,
    series,
    total,
)


def page() -> Page:
    panels = read_panels("fleet_panels.csv", {})
    by_kind, stragglers = panels["What is wrong"]
    anomalies_now, *broken = _wrong()
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
        rows=[
            Row("Now", panels["Now"]),
            Row("What is wrong", [anomalies_now, by_kind, *broken, stragglers], width=12),
            Row("Nodes", [_nodes(), *panels["Nodes"]]),
            Row("Use and waste", [*_waste(), *panels["Use and waste"]], width=12),
            Row("Jobs by MFU and goodput", [_jobs()]),
            Row("Energy", panels["Energy"]),
        ],
    )


# A MIG GPU is counted once: its instances are devices of their own.
WHOLE = 'gpu_instance=""'
MOSTLY_IDLE_RATIO = 0.5
BUSY = rate(series("device_busy_seconds_total"))
IDLE_OVER_TIME = f"1 - {rate(series('device_busy_seconds_total'), '$__range')}"


def _hours(gpus: str) -> str:
    """Return the hours of a count over the time range."""
    return f"sum_over_time(({gpus})[$__range:$__interval]) * $__interval_ms / 3.6e6"


_HOLDER = "cluster, $holder"
_DEVICE_UP, _UNUSED = series("device_up"), f"1 - {BUSY}"
# Without the node, which an anomaly has on bare hosts too, where the device's series lack it.
_BY_UUID = "cluster, instance, uuid"
_CRITICAL = series("anomaly_info", AGENT, 'scope="hardware",severity="critical",uuid!=""')
_BROKEN = f"group by ({_BY_UUID}) ({_CRITICAL} or {_DEVICE_UP} == 0)"
_IDLE_NOW = f"{_UNUSED} unless on ({_BY_UUID}) {_BROKEN}"
# A device that cannot be read has no counter of busy time.
_LOST = f"({_UNUSED} and on ({_BY_UUID}) {_BROKEN}) or {_DEVICE_UP} == bool 0"
_WASTED = f"{_UNUSED} or {_DEVICE_UP} == bool 0"


def _waste() -> list[models.Panel]:
    return [
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
                Column(_hours(total(_HOLDER, ALLOCATIONS)), "Held", "h"),
                Column(_hours(total(_HOLDER, of_allocations(BUSY))), "Used", "h"),
                Column(_hours(total(_HOLDER, of_allocations(_IDLE_NOW))), "Idle", "h"),
                Column(_hours(total(_HOLDER, of_allocations(_LOST))), "Lost", "h"),
                Column(f"{_hours(total(_HOLDER, of_allocations(_WASTED)))} * $gpu_price", "Cost"),
            ],
        ),
    ]


_SERVERS = series("rank_info", AGENT, 'kind="serve"')
_SERVED = f"on ({BY_JOB}) last_over_time({_SERVERS}[$__range])"
_RANKS = f"(last_over_time({series('rank_up')}[$__range]) unless {_SERVED})"
_FLOPS = f"avg_over_time({series('job_model_flops_ratio')}[$__range])"
_GOODPUT = "avg_over_time(warpwatch:job:goodput:ratio_rate10m[$__range])"


def _jobs() -> models.Panel:
    return table(
        "Jobs by MFU and goodput",
        "Trainings of the time shown, lowest goodput first; a click on a column ranks by "
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


_AGENTS = series("build_info", AGENT, NO_FLEET)
_OF_HARDWARE = 'scope="hardware"'
_TO_SERVE = 'kind="device_needs_service"'
_XIDS = total(f"{PLACE}, gpu, xid", grown(series("device_xid_errors_total"), "$__range"))
# Every ten minutes, for which an event stays active: all scrapes of a month are too many to count.
_MONTH = "[30d:10m]"
_HARDWARE = f"{series('anomaly_info', AGENT, _OF_HARDWARE)}{_MONTH}"
_ILL = total(f"{PLACE}, uuid, kind", f"count_over_time({_HARDWARE})")
_SEEN = f"max by (cluster, instance) (count_over_time({_AGENTS}{_MONTH}))"
_AILING = f"{_ILL} / on (cluster, instance) group_left () {_SEEN}"


def _wrong() -> list[models.Panel]:
    return [
        table(
            "Anomalies now",
            "Each anomaly that is active, and the job, rank or GPU that it is about. The "
            f"agent's page has its evidence and its capture. {EMPTY_WHEN_HEALTHY}",
            [Column(f"{anomalies()} == 1")],
            hidden=["__name__", "job", "uuid", "link"],
            width=16,
            links=[links.node_of_row(), links.job_of_row()],
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
    ]


_USED = total(PLACE, series("device_memory_used_bytes", AGENT, WHOLE))
_WHOLE = total(PLACE, series("device_memory_total_bytes", AGENT, WHOLE))
_HOTTEST = series("device_temperature_celsius", AGENT, 'sensor="gpu"')
_ACTIVE = f"{series('anomaly_active', AGENT, NO_FLEET)} or {at_nodes('anomaly_active')}"
_ANOMALIES = f"{total(PLACE, _ACTIVE)} and on ({PLACE}) {_AGENTS}"


def _nodes() -> models.Panel:
    return table(
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
    )
