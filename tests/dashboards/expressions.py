"""Every PromQL expression of a dashboard, as Grafana would send it with All chosen everywhere."""

import functools
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import warpwatch_dashboards

FOLDER = Path(warpwatch_dashboards.__file__).parent
NAMES = ("fleet", "inference-server", "node", "training-job", "warpwatch")
EMPTY_WHEN_HEALTHY = "Empty when healthy."

ALL = ".*"
TIMES = {
    "__rate_interval": "20s",
    "__interval": "5s",
    "__range": "60s",
    "__range_s": "60",
    "__interval_ms": "5000",
    "price": "0.15",
    "gpu_price": "2",
    "holder": "namespace",
}


@dataclass(frozen=True, slots=True)
class Expression:
    """An expression; ``labels`` are used by a legend, a title or a variable."""

    where: str
    promql: str
    labels: tuple[str, ...]
    empty_when_healthy: bool


@functools.cache
def dashboards() -> dict[str, dict[str, Any]]:
    """The committed ones, by the name of their file."""
    return {name: json.loads((FOLDER / f"{name}.json").read_text()) for name in NAMES}


def panels(dashboard: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Without the rows between them."""
    return (panel for panel in unfolded(dashboard) if panel["type"] != "row")


def unfolded(dashboard: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Rows and panels as they follow each other, those of collapsed rows too."""
    for panel in dashboard["panels"]:
        yield panel
        yield from panel.get("panels", ())


def expressions(
    dashboard: Mapping[str, Any], values: Mapping[str, str] | None = None
) -> Iterator[Expression]:
    """Yield a dashboard's expressions with ``values`` of variables; the default is All or TIMES."""
    known = {name["name"]: ALL for name in dashboard["templating"]["list"]} | TIMES
    known |= dict(values or {})
    for found in (*_of_panels(dashboard), *_of_variables(dashboard), *_of_annotations(dashboard)):
        where = f"{dashboard['title']}: {found.where}"
        promql = substituted(found.promql, known)
        yield Expression(where, promql, found.labels, found.empty_when_healthy)


def substituted(promql: str, values: Mapping[str, str]) -> str:
    """Raises KeyError for a variable that does not exist."""
    return re.sub(r"\$(?:\{(\w+)[^}]*\}|(\w*[A-Za-z]\w*))", lambda m: values[m[1] or m[2]], promql)


def _of_panels(dashboard: Mapping[str, Any]) -> Iterator[Expression]:
    for panel in panels(dashboard):
        empty = panel["description"].endswith(EMPTY_WHEN_HEALTHY)
        for target in panel["targets"]:
            where = f"{panel['title']} {target['refId']}"
            yield Expression(where, target["expr"], _templated(target["legendFormat"]), empty)


def _of_variables(dashboard: Mapping[str, Any]) -> Iterator[Expression]:
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            query = variable["query"]["query"]
            where = f"variable {variable['name']}"
            if values := re.fullmatch(r"label_values\((.+), (\w+)\)", query):
                yield Expression(where, values[1], (values[2],), False)
            else:
                result = re.fullmatch(r"query_result\((.+)\)", query)
                label = re.match(r"/(\w+)=", variable["regex"])
                assert result and label, query
                yield Expression(where, result[1], (label[1],), False)


def _of_annotations(dashboard: Mapping[str, Any]) -> Iterator[Expression]:
    for query in dashboard["annotations"]["list"]:
        if "expr" in query:
            labels = _templated(query["titleFormat"] + query["textFormat"])
            yield Expression(f"annotation {query['name']}", query["expr"], labels, True)


def _templated(template: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(re.findall(r"\{\{(\w+)\}\}", template)))
