"""*Warpwatch itself*: whether the agents run, what they read, what they lose, what they cost.

Most of its panels are the lines of agent_panels.csv.
"""

from __future__ import annotations

from grafana_foundation_sdk.models import dashboard as models

from warpwatch_dashboards import links, variables
from warpwatch_dashboards.page import Page, Row
from warpwatch_dashboards.panel_table import read_panels
from warpwatch_dashboards.panels import EMPTY_WHEN_HEALTHY, Column, graph, table
from warpwatch_dashboards.queries import AGENT, PLACE, SCRAPED, WINDOW, Query, grown, series, total


def page() -> Page:
    panels = read_panels("agent_panels.csv", {})
    errors, reloads = _losses()
    return Page(
        uid=links.AGENT,
        title="Warpwatch / Warpwatch itself",
        description="The agents: up or not, what they read, lose and refuse, and what they cost.",
        variables=variables.of_agents(),
        annotations=variables.marks_of_agents(),
        rows=[
            Row("Agents", [*panels["Agents"], *_failing()], width=12),
            Row("Reading", panels["Reading"]),
            Row("Lost and refused", [errors, *panels["Lost and refused"], reloads], width=6),
            Row("Captures", [_captures(), *panels["Captures"]]),
            Row("What it costs", panels["What it costs"]),
        ],
    )


def _failing() -> list[models.Panel]:
    return [
        table(
            "Agents down",
            f"Which agents do not answer. {EMPTY_WHEN_HEALTHY}",
            [Column(f"{SCRAPED} == 0")],
            hidden=["__name__", "job"],
            height=6,
        ),
        table(
            "Sources that fail",
            "What cannot be read where. `warpwatch doctor` on that node says why. "
            f"{EMPTY_WHEN_HEALTHY}",
            [Column(f"{series('source_up')} == 0")],
            hidden=["__name__", "job"],
            height=6,
            links=[links.node_of_row()],
        ),
    ]


_LOSSES = [
    (series("detection_refused_total"), "what", "detection: {{what}}"),
    (series("detector_errors_total"), "kind", "detector: {{kind}}"),
    (series("anomaly_store_errors_total"), "operation", "history: {{operation}}"),
    (series("rendezvous_rejected_total"), "reason", "input: {{reason}}"),
    (series("attribution_errors_total"), "origin", "attribution: {{origin}}"),
    (series("nvml_errors_total"), "code", "NVML: {{code}}"),
    (series("jsonl_errors_total"), "", "log"),
    (
        series("otlp_exports_total", AGENT, 'result=~"failed|dropped"'),
        "signal, result",
        "OpenTelemetry: {{signal}} {{result}}",
    ),
    (
        series("webhook_messages_total", AGENT, 'result=~"failed|refused|dropped"'),
        "result",
        "webhooks: {{result}}",
    ),
    (series("fleet_kubernetes_errors_total"), "what", "Kubernetes: {{what}}"),
]
_LOST = [Query(total(label, grown(counter, WINDOW)), legend) for counter, label, legend in _LOSSES]
_FAILED = series("config_reloads_total", AGENT, 'result="failed"')


def _losses() -> list[models.Panel]:
    return [
        graph(
            "Errors and refusals",
            "What agents could not do or did not take, by what: input from training processes "
            f"that was refused, detectors that failed, records lost. {EMPTY_WHEN_HEALTHY}",
            *_LOST,
            width=12,
        ),
        table(
            "Failed reloads",
            "Agents that refused a changed configuration in the time shown and run on with the "
            f"old one: `warpwatch config check` says why. {EMPTY_WHEN_HEALTHY}",
            [Column(total(PLACE, grown(_FAILED, "$__range")), "Times")],
        ),
    ]


def _captures() -> models.Panel:
    asked = total("kind, trigger, outcome", series("captures_total"))
    return table(
        "Captures since the agents' start",
        "Captures asked for, by whom, and what became of them: outcomes that begin with "
        f"refused say which limit of the policy held. {EMPTY_WHEN_HEALTHY}",
        [Column(asked, "Captures")],
        width=8,
    )
