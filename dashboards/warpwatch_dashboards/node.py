"""*Node and GPUs*: one node or several, device by device, with processes and the host.

Its graphs are the lines of node_panels.csv.
"""

from __future__ import annotations

from grafana_foundation_sdk.models import dashboard as models

from warpwatch_dashboards import links, variables
from warpwatch_dashboards.page import Page, Row
from warpwatch_dashboards.panel_table import read_panels
from warpwatch_dashboards.panels import (
    EMPTY_WHEN_HEALTHY,
    Column,
    at_least,
    at_most,
    table,
)
from warpwatch_dashboards.queries import (
    DEVICE,
    DEVICE_KEY,
    anomalies,
    rate,
    series,
)


def page() -> Page:
    graphs = read_panels("node_panels.csv", {"device": DEVICE})
    *at_a_glance, mig = graphs.pop("GPUs")
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
        annotations=variables.marks_of_agents(),
        rows=[
            Row("GPUs", [*at_a_glance, _devices(), _anomalies(), mig]),
            *(Row(title, panels, collapsed=True) for title, panels in graphs.items()),
        ],
    )


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


def _anomalies() -> models.Panel:
    return table(
        "Anomalies now",
        "What is wrong with these nodes, their GPUs and ranks. The agent's page has the "
        f"evidence and the capture. {EMPTY_WHEN_HEALTHY}",
        [Column(f"{anomalies()} == 1")],
        hidden=["__name__", "job", "uuid", "link"],
        width=16,
        links=[links.job_of_row()],
    )
