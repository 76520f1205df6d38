"""*Inference server*: how long its users wait, what an iteration takes, and what holds it up.

Most of its panels are the rows of server_panels.csv.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping
from itertools import groupby
from operator import itemgetter
from pathlib import Path

from grafana_foundation_sdk.models import dashboard as models

from warpwatch_dashboards import links, variables
from warpwatch_dashboards.page import Page, Row
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

_PANELS = Path(__file__).with_name("server_panels.csv")
_METRIC = re.compile(r"(\w+)(?:\{(\w+=\"(\w+)\")\})?")
_QUANTILES = (0.5, 0.9, 0.99)


def page() -> Page:
    return Page(
        uid=links.INFERENCE_SERVER,
        title="Warpwatch / Inference server",
        description="One served model over all its replicas: latencies, iterations, KV cache.",
        variables=[*variables.of_agents(), variables.namespace(), variables.job()],
        annotations=variables.marks_of_jobs(),
        rows=[*_rows(), _REASONS_ROW],
    )


def _rows() -> list[Row]:
    with _PANELS.open(newline="", encoding="utf-8") as file:
        rows = groupby(csv.DictReader(file), itemgetter("row"))
        return [Row(title, [_panel(one) for one in of_row]) for title, of_row in rows]


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


_SHARES = f"max by ({BY_JOB}, finding) ({series('diagnosis_share_ratio', JOB)})"
_REASONS_ROW = Row(
    "Why",
    [
        bars(
            "Newest diagnosis",
            "Share of the iterations that each finding of the newest capture explains. "
            f"{EMPTY_WHEN_HEALTHY}",
            Query(_SHARES, f"{JOB_LEGEND} {{{{finding}}}}"),
            unit="percentunit",
            minimum=0,
            maximum=1,
        ),
        table(
            "Anomalies now",
            "What is wrong with the server now. The agent's page has the evidence and the "
            f"capture. {EMPTY_WHEN_HEALTHY}",
            [Column(f"{series('anomaly_info', JOB)} == 1")],
            hidden=["__name__", "job", "gpu", "uuid", "link"],
            links=[links.node_of_row()],
            width=16,
        ),
    ],
)
