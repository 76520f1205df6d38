"""*Warpwatch itself*: whether the agents run, what they read, what they lose, what they cost.

The panels about one metric of the agents each are the rows of agent_panels.csv.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from grafana_foundation_sdk.models import dashboard as models

from warpwatch_dashboards import links, variables
from warpwatch_dashboards.page import Page, Row, rows_of
from warpwatch_dashboards.panels import (
    EMPTY_WHEN_HEALTHY,
    Column,
    PanelSize,
    at_most,
    bars,
    graph,
    number,
    table,
)
from warpwatch_dashboards.queries import (
    AGENT,
    NODE_LEGEND,
    PLACE,
    WINDOW,
    Query,
    grown,
    rate,
    series,
    total,
)

_ASKED = total("kind, trigger, outcome", series("captures_total"))
_RECENT = total("outcome", grown(series("captures_total"), "$__range"))
_PROBLEMS = total("problem", grown(series("capture_problems_total"), "$__range"))
_ALERTS = total("outcome", grown(series("alerts_received_total"), "$__range"))
CAPTURES_ROW = Row(
    "Captures",
    [
        table(
            "Captures since the agents' start",
            "Captures asked for, by whom, and what became of them: outcomes that begin with "
            f"refused say which limit of the policy held. {EMPTY_WHEN_HEALTHY}",
            [Column(_ASKED, "Captures")],
            width=8,
        ),
        bars(
            "Outcomes",
            f"What became of the captures of the time shown. {EMPTY_WHEN_HEALTHY}",
            Query(_RECENT, "{{outcome}}"),
        ),
        bars(
            "Problems of traces",
            "What traces lacked when they were verified: no kernels, wrong steps, unreadable. "
            f"{EMPTY_WHEN_HEALTHY}",
            Query(_PROBLEMS, "{{problem}}"),
        ),
        graph(
            "Captures in the store",
            "Captures that agents keep, the ten with the most; retention by age, count and size "
            "removes the oldest.",
            Query(f"topk(10, {total(PLACE, series('store_captures'))})", NODE_LEGEND),
        ),
        graph(
            "Size of the store",
            "Bytes on disk of the ten largest stores, up to store.max_bytes (5 GiB).",
            Query(f"topk(10, {total(PLACE, series('store_bytes'))})", NODE_LEGEND),
            unit="bytes",
        ),
        graph(
            "What captures cost",
            "Seconds of one rank a second that captures cost: the steps that started, recorded and "
            f"exported them, less what these used to take. {EMPTY_WHEN_HEALTHY}",
            Query(total("kind", rate(series("capture_cost_seconds_total"))), "{{kind}}"),
            unit="percentunit",
            width=12,
        ),
        bars(
            "Alerts received",
            "Alerts that webhooks brought in the time shown, by what became of them: captured, or "
            f"why not. {EMPTY_WHEN_HEALTHY}",
            Query(_ALERTS, "{{outcome}}"),
            width=12,
        ),
    ],
    width=4,
)


# The name of the scrape job in the chart's monitors and docs/dashboards.md.
SCRAPED = f'up{{job="warpwatch",{AGENT}}}'


def page() -> Page:
    reading, cost = rows_of("agent_panels.csv", _panel)
    return Page(
        uid=links.AGENT,
        title="Warpwatch / Warpwatch itself",
        description="The agents: up or not, what they read, lose and refuse, and what they cost.",
        variables=variables.of_agents(),
        annotations=variables.marks_of_agents(),
        rows=[_AGENTS_ROW, reading, _LOSSES_ROW, CAPTURES_ROW, cost],
    )


def _panel(row: Mapping[str, str]) -> models.Panel:
    """Return the panel of a row.

    show: a gauge as it is, the rate of a counter, or the age of a timestamp. by: a label, with a
    line for each value over all agents; without one there is a line for each of the ten agents
    with the most.
    """
    show, label = row["show"], row["by"]
    promql = series(row["metric"])
    if show == "rate":
        promql = rate(promql)
    elif show == "age":
        promql = f"time() - {promql}"
    if label:
        over_agents = "sum" if show == "rate" else "max"
        query = Query(f"{over_agents} by ({label}) ({promql})", f"{{{{{label}}}}}")
    else:
        # An agent has a timestamp for each device.
        most = f"max by ({PLACE}) ({promql})" if show == "age" else promql
        query = Query(f"topk(10, {most})", NODE_LEGEND)
    size: PanelSize = {"unit": row["unit"] or "none", "width": int(row["width"])}
    if row["limit"]:
        size["limits"] = at_most(json.loads(row["limit"]))
    return graph(row["title"], row["description"], query, **size)


_STARTED = series("agent_start_timestamp_seconds")
_AGENTS_ROW = Row(
    "Agents",
    [
        number(
            "Agents up",
            "Agents that answer Prometheus.",
            Query(f"sum({SCRAPED})"),
        ),
        number(
            "Agents down",
            "Agents that Prometheus knows and that do not answer. Anything above 0: look at the "
            "pod, or at the unit's log.",
            Query(f"sum({SCRAPED} == bool 0)"),
            limits=at_most(1, 1),
        ),
        number(
            "Sources that fail",
            "Sources that an agent is set to read and cannot. The table below names them.",
            Query(f"sum({series('source_up')} == bool 0)"),
            limits=at_most(1),
        ),
        bars(
            "Versions",
            "Agents by version. Two are a rollout under way, or one that stopped.",
            Query(f"count by (version) ({series('build_info')})", "{{version}}"),
            width=6,
            height=4,
        ),
        graph(
            "Since the start",
            "How long each agent has run, the ten youngest. A saw is an agent that is killed "
            "again and again: see its memory.",
            Query(f"bottomk(10, time() - {_STARTED})", NODE_LEGEND),
            unit="s",
            width=6,
            height=4,
        ),
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
    ],
    width=12,
)


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
_LOSSES_ROW = Row(
    "Lost and refused",
    [
        graph(
            "Errors and refusals",
            "What agents could not do or did not take, by what: input from training processes "
            f"that was refused, detectors that failed, records lost. {EMPTY_WHEN_HEALTHY}",
            *_LOST,
            width=12,
        ),
        graph(
            "Ranks without series",
            "Ranks beyond the 1,000 whose series an agent exports, the ten agents with the most. "
            "Above 0 the dashboards do not show all ranks.",
            Query(f"topk(10, {series('ranks_unexported')})", NODE_LEGEND),
        ),
        table(
            "Failed reloads",
            "Agents that refused a changed configuration in the time shown and run on with the "
            f"old one: `warpwatch config check` says why. {EMPTY_WHEN_HEALTHY}",
            [Column(total(PLACE, grown(_FAILED, "$__range")), "Times")],
        ),
    ],
    width=6,
)
