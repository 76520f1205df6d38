"""*Node and GPUs*: everything that is known of one node, or of some, device by device."""

from __future__ import annotations

from dataclasses import replace

from grafana_foundation_sdk.models import dashboard as models

from warpwatch_dashboards import links, marks, variables
from warpwatch_dashboards.device_panels import by_device, device_rows
from warpwatch_dashboards.node_host import HOST_ROWS
from warpwatch_dashboards.page import Page, Row
from warpwatch_dashboards.panels import EMPTY_WHEN_HEALTHY, at_least, at_most, graph
from warpwatch_dashboards.queries import DEVICE, DEVICE_KEY, Query, rate, series
from warpwatch_dashboards.tables import Column, table


def page() -> Page:
    return Page(
        uid=links.NODE,
        title="Warpwatch / Node and GPUs",
        description="GPUs and MIG instances by family of metrics, processes and the host.",
        variables=[
            variables.datasource(),
            variables.cluster(),
            variables.node(),
            variables.one_instance(),
            variables.gpu(),
        ],
        annotations=marks.of_agents(),
        rows=[
            _OVERVIEW_ROW,
            *device_rows(),
            *(replace(row, collapsed=True) for row in HOST_ROWS),
        ],
    )


def _at_a_glance() -> list[models.Panel]:
    """Return a line per GPU: load, power, temperature, memory."""
    used, whole = (series(f"device_memory_{of}_bytes", DEVICE) for of in ("used", "total"))
    busy = rate(series("device_busy_seconds_total", DEVICE))
    heat = series("device_temperature_celsius", DEVICE, 'sensor="gpu"')
    shown = (
        ("Use", "Share of time in which a kernel ran.", "percentunit", busy),
        ("Power drawn", "What each GPU draws.", "watt", series("device_power_watts", DEVICE)),
        ("Heat", "Temperature of each GPU.", "celsius", heat),
        ("Memory full", "Memory in use by what it has.", "percentunit", f"{used} / {whole}"),
    )
    return [
        graph(title, words, by_device(promql), unit=unit, width=6)
        for title, words, unit, promql in shown
    ]


def _devices() -> models.Panel:
    memory = series("device_memory_used_bytes", DEVICE)
    whole = series("device_memory_total_bytes", DEVICE)
    hottest = series("device_temperature_celsius", DEVICE, 'sensor="gpu"')
    owners = (
        f"{series('device_workload_info', DEVICE)} or {series('device_slurm_job_info', DEVICE)}"
    )
    values = [
        Column(series("device_up", DEVICE), "Up", "none", at_least(1)),
        Column(rate(series("device_busy_seconds_total", DEVICE)), "Busy", "percentunit"),
        Column(f"{memory} / {whole}", "Memory", "percentunit", at_most(0.9)),
        Column(series("device_power_watts", DEVICE), "Power", "watt"),
        Column(hottest, "Temperature", "celsius"),
    ]
    described = f"{DEVICE_KEY}, name, driver_version"
    return table(
        "GPUs and MIG instances",
        "One line a device: what it is, who has it, how it does. Up is 0 where it cannot be read.",
        [
            Column(f"max by ({described}) ({series('device_info', DEVICE)})"),
            Column(f"max by ({DEVICE_KEY}, namespace, pod, slurm_job) ({owners})"),
            *(
                Column(f"max by ({DEVICE_KEY}) ({c.promql})", c.title, c.unit, c.limits)
                for c in values
            ),
        ],
        width=24,
    )


_OVERVIEW_ROW = Row(
    "GPUs",
    [
        *_at_a_glance(),
        _devices(),
        table(
            "Anomalies now",
            "What is wrong with these nodes, their GPUs and ranks. The agent's page has the "
            f"evidence and the capture. {EMPTY_WHEN_HEALTHY}",
            [Column(f"{series('anomaly_info')} == 1")],
            hidden=["__name__", "job", "uuid", "link"],
            width=16,
            links=[links.job_of_row()],
        ),
        graph(
            "MIG",
            "GPUs and MIG instances by profile; a GPU without a profile is a whole one. It "
            "changes when a GPU is partitioned again.",
            Query(f"count by (profile) ({series('device_up', DEVICE)})", "GPU {{profile}}"),
            stacked=True,
        ),
    ],
)
