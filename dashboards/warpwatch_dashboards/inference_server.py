"""*Inference server*: how long its users wait, what an iteration takes, and what holds it up.

Most of its panels are the rows of server_panels.csv.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from grafana_foundation_sdk.models import dashboard as models

from warpwatch_dashboards import links, variables
from warpwatch_dashboards.page import Page, Row, rows_of
from warpwatch_dashboards.panels import (
    PanelSize,
    anomalies_now,
    at_most,
    graph,
    newest_diagnosis,
    number,
)
from warpwatch_dashboards.queries import (
    BY_JOB,
    JOB,
    JOB_LEGEND,
    RANK_KEY,
    RANK_LEGEND,
    Query,
    rate,
    series,
    total,
)

_METRIC = re.compile(r"(\w+)(?:\{(\w+=\"(\w+)\")\})?")
_QUANTILES = (0.5, 0.9, 0.99)


def page() -> Page:
    return Page(
        uid=links.INFERENCE_SERVER,
        title="Warpwatch / Inference server",
        description="One served model over all its replicas: latencies, iterations, KV cache.",
        variables=[*variables.of_agents(), variables.namespace(), variables.job()],
        annotations=variables.marks_of_jobs(),
        rows=[*rows_of("server_panels.csv", _panel), _REASONS_ROW],
    )


def _panel(row: Mapping[str, str]) -> models.Panel:
    """Return the panel of a row: a number, a graph, or a graph of stacked parts."""
    size: PanelSize = {"unit": row["unit"] or "none"}
    if row["limit"]:
        size["limits"] = at_most(float(row["limit"]))
    queries = _queries(row)
    if row["kind"] == "number":
        return number(row["title"], row["description"], *queries, **size)
    stacked = row["kind"] == "stack"
    return graph(row["title"], row["description"], *queries, stacked=stacked, **size)


def _queries(row: Mapping[str, str]) -> list[Query]:
    """Return the queries of a row.

    show: the sum or maximum of a gauge, the rate of a counter, the share of a counter in another,
    or the mean or quantiles of a histogram. by: a label with a line for each value.
    """
    show, label = row["show"], row["by"]
    by, legend = f"{label}, {BY_JOB}" if label else BY_JOB, JOB_LEGEND
    if label:
        legend += f" {{{{{label}}}}}"
    if label == "rank":
        by, legend = RANK_KEY, RANK_LEGEND
    found = _METRIC.findall(row["metric"])
    metrics = [series(name, JOB, *filter(None, [own])) for name, own, _ in found]
    rates = [total(by, rate(metric)) for metric in metrics]
    if show == "share":
        return [Query(" / ".join(rates), legend)]
    if show in ("mean", "quantiles"):
        return _of_histogram(found[0][0], by, legend, show)
    promqls = rates if show == "rate" else [f"{show} by ({by}) ({metric})" for metric in metrics]
    marks = [f" {value}" if len(found) > 1 else "" for *_, value in found]
    return [Query(promql, legend + mark) for promql, mark in zip(promqls, marks, strict=True)]


def _of_histogram(name: str, by: str, legend: str, show: str) -> list[Query]:
    of = {part: rate(series(f"{name}_{part}", JOB)) for part in ("sum", "count", "bucket")}
    if show == "mean":
        return [Query(f"{total(by, of['sum'])} / {total(by, of['count'])}", legend)]
    buckets = total(f"le, {by}", of["bucket"])
    return [
        Query(f"histogram_quantile({one}, {buckets})", f"{legend} p{100 * one:.0f}")
        for one in _QUANTILES
    ]


_REASONS_ROW = Row(
    "Why",
    [
        newest_diagnosis(
            "Share of the iterations that each finding of the newest capture explains."
        ),
        anomalies_now("server", width=16),
    ],
)
