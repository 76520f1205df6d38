"""The panels of *Node and GPUs* about one metric each: the rows of device_panels.csv."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Mapping
from itertools import groupby
from operator import itemgetter
from pathlib import Path

from grafana_foundation_sdk.models import dashboard as models

from warpwatch_dashboards.page import Row
from warpwatch_dashboards.panels import EMPTY_WHEN_HEALTHY, Limits, PanelSize, graph
from warpwatch_dashboards.queries import (
    DEVICE,
    DEVICE_KEY,
    GPU_LEGEND,
    WINDOW,
    Query,
    grown,
    rate,
    series,
    total,
)

_FILE = Path(__file__).with_suffix(".csv")
_METRIC = re.compile(r"(\w+)(?:\{(.*?)\})?")


def device_rows() -> list[Row]:
    """Return the rows of panels in the order of the file, closed at first."""
    with _FILE.open(newline="", encoding="utf-8") as file:
        rows = groupby(csv.DictReader(file), itemgetter("row"))
        return [Row(title, [_panel(one) for one in of_row], True) for title, of_row in rows]


def _panel(row: Mapping[str, str]) -> models.Panel:
    """Return the panel of a row.

    show: a gauge as it is, the rate of a counter, its growth if it counts rare events, or the sum
    over devices. metric: one, or two of which the first is divided by the second. label: one of
    the metric's own, with a line for each value. colors: each up to the number after it.
    """
    metrics = [series(name, DEVICE, *filter(None, [own])) for name, own in _metrics(row)]
    promql, label, description = " / ".join(metrics), row["label"], row["description"]
    query = by_device(promql, label)
    if row["show"] == "rate":
        query = by_device(rate(promql), label)
    elif row["show"] == "growth":
        by = f"{DEVICE_KEY}, {label}" if label else DEVICE_KEY
        query = by_device(total(by, grown(promql, WINDOW)), label)
        description += f" {EMPTY_WHEN_HEALTHY}"
    elif row["show"] == "sum":
        query = Query(total(label, promql), f"{{{{{label}}}}}")
    return graph(row["title"], description, query, **_size(row))


def _metrics(row: Mapping[str, str]) -> list[tuple[str, str]]:
    return _METRIC.findall(row["metric"])


def _size(row: Mapping[str, str]) -> PanelSize:
    size: PanelSize = {"unit": row["unit"] or "none", "width": int(row["width"] or 0)}
    if row["unit"] == "share":
        size |= {"unit": "percentunit", "maximum": 1}
    if row["colors"]:
        colors, numbers = row["colors"].split()[::2], row["colors"].split()[1::2]
        limits: Limits = list(zip([None, *map(json.loads, numbers)], colors, strict=True))
        size["limits"] = limits
    return size


def by_device(expression: str, label: str = "") -> Query:
    return Query(expression, f"{GPU_LEGEND} {{{{{label}}}}}" if label else GPU_LEGEND)
