"""Panels that are lines of a table, a CSV file of this folder.

row: the title of the panel's row. kind: a name of KINDS. query: PromQL in which metrics have
neither prefix nor selection, and ``rate``, ``grown`` and ``increased`` their usual window. An
upper-case word is the constant of this name in queries.py, in the legend too. each: words, with a
query for each in the place of EACH. ``word=name`` has another name in the legend. unit: Grafana's,
``share`` for a ratio up to 1, ``flag`` for 0 or 1. limits: colors, each up to the number after it.
links: functions of links.py.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from grafana_foundation_sdk.models import dashboard as models

from warpwatch_dashboards import links, queries
from warpwatch_dashboards.panels import Limits, PanelSize, bars, graph, heat_map, number
from warpwatch_dashboards.queries import AGENT, WINDOW, Query, grown, increased, rate, series
from warpwatch_telemetry.catalogue import CATALOGUE

KINDS: dict[str, Callable[..., models.Panel]] = {
    "graph": graph,
    "stack": partial(graph, stacked=True),
    "number": number,
    "bars": bars,
    "heat_map": heat_map,
}
# Units of the table that Grafana does not have.
UNITS = {"": "none", "share": "percentunit", "flag": "none"}
_CONSTANT = re.compile(r"\b[A-Z][A-Z_]+\b")
# A metric, with labels of its own.
_METRIC = re.compile(r"\b([a-z][a-z0-9_:]*)\b(?:\{(.*?)\})?")
_CALL = re.compile(r"\b(rate|grown|increased)\(([^()\[\]]*)(?:\[(.*?)\])?\)")
_CALLS = {"rate": rate, "grown": grown, "increased": increased}
_SCOPES = {
    f"{name}{end}": row.scope
    for name, row in CATALOGUE.items()
    for end in ("", "_bucket", "_sum", "_count")
}


def read_panels(file: str, selections: Mapping[str, str]) -> dict[str, list[models.Panel]]:
    """Return the panels of a table by the title of their row.

    selections: the selections of metrics by their scope in the catalogue, else AGENT.
    """
    found: dict[str, list[models.Panel]] = {}
    with Path(__file__).with_name(file).open(newline="", encoding="utf-8") as lines:
        for line in csv.DictReader(lines):
            found.setdefault(line["row"], []).append(_panel(line, selections))
    return found


def _panel(line: Mapping[str, str], selections: Mapping[str, str]) -> models.Panel:
    of_panel = []
    for each in line["each"].split() or [""]:
        word, _, name = each.partition("=")
        promql = expand(line["query"].replace("EACH", word), selections)
        legend = line["legend"].replace("EACH", name or word.replace("_", " "))
        of_panel.append(Query(promql, _CONSTANT.sub(_constant, legend)))
    return KINDS[line["kind"]](line["title"], line["description"], *of_panel, **_size(line))


def expand(query: str, selections: Mapping[str, str]) -> str:
    """Return the PromQL of a line's query."""

    def selected(metric: re.Match[str]) -> str:
        name, own = metric.groups()
        if name not in _SCOPES:
            return metric[0]
        where = selections.get(_SCOPES[name], AGENT)
        return series(name, where, *filter(None, [own]))

    def called(call: re.Match[str]) -> str:
        return _CALLS[call[1]](call[2], call[3] or WINDOW)

    return _CONSTANT.sub(_constant, _CALL.sub(called, _METRIC.sub(selected, query)))


def _constant(word: re.Match[str]) -> str:
    name = word[0]
    # GPU is only a word; a misspelled BY_JOB raises AttributeError.
    return str(getattr(queries, name) if "_" in name else getattr(queries, name, name))


def _size(line: Mapping[str, str]) -> PanelSize:
    size: PanelSize = {"unit": UNITS.get(line["unit"], line["unit"])}
    if line["unit"] in ("share", "flag"):
        size["maximum"] = 1
    if line["width"]:
        size["width"] = int(line["width"])
    if line["height"]:
        size["height"] = int(line["height"])
    if line["limits"]:
        colors, numbers = line["limits"].split()[::2], line["limits"].split()[1::2]
        limits: Limits = list(zip([None, *map(json.loads, numbers)], colors, strict=True))
        size["limits"] = limits
    if line["links"]:
        size["links"] = [getattr(links, name)() for name in line["links"].split()]
    return size
