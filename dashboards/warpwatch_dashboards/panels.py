"""The kinds of panel, each a function of title, description and queries.

A description says what the panel means and what to look for. It ends with EMPTY_WHEN_HEALTHY if
the panel shows nothing while all is well. Every other panel has data on every healthy node with the
hardware that it is about.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from string import ascii_uppercase
from typing import TypedDict, Unpack

from grafana_foundation_sdk.builders import bargauge, common, heatmap, prometheus, stat, timeseries
from grafana_foundation_sdk.builders import table as builders
from grafana_foundation_sdk.builders.heatmap import CellValues, HeatmapColorOptions
from grafana_foundation_sdk.models import common as looks
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models.common import TableAutoCellOptions, TableSortByFieldState
from grafana_foundation_sdk.models.heatmap import HeatmapColorMode
from grafana_foundation_sdk.models.prometheus import PromQueryFormat
from grafana_foundation_sdk.models.table import Options as TableOptions

from warpwatch_dashboards.links import Link, node_of_row
from warpwatch_dashboards.queries import BY_JOB, JOB, JOB_LEGEND, OF_JOB, Query, anomalies, series
from warpwatch_dashboards.variables import SOURCE

EMPTY_WHEN_HEALTHY = "Empty when healthy."

# NODE_LEGEND writes node and address; this leaves the node, or the address where it has no name.
SHORT_NODE = models.DataTransformerConfig(
    id_val="renameByRegex",
    options={"regex": r"^(?:\|([^|]*)|([^|]+)\|[^|]*)(?:\|(.*))?$", "renamePattern": "$1$2 $3"},
)

GREEN, ORANGE, RED = "green", "orange", "red"
# Value from which on a colour holds; None: from the lowest.
Limits = Sequence[tuple[float | None, str]]


class PanelSize(TypedDict, total=False):
    """Width of 24 columns, else the row's; height in rows of 30 pixels.

    unit: Grafana's id of it, else a plain number; minimum, maximum and limits are in the unit.
    """

    unit: str
    width: int
    height: int
    minimum: float
    maximum: float
    limits: Limits
    links: Sequence[Link]


def at_most(warning: float, critical: float | None = None) -> Limits:
    worst = [] if critical is None else [(critical, RED)]
    return [(None, GREEN), (warning, ORANGE), *worst]


def at_least(good: float) -> Limits:
    return [(None, ORANGE), (good, GREEN)]


def graph(
    title: str, description: str, *queries: Query, stacked: bool = False, **look: Unpack[PanelSize]
) -> models.Panel:
    """Return series over time, from 0 on by default; limits are dashed lines."""
    panel = _lines()
    look.setdefault("minimum", 0)
    if stacked:
        panel.stacking(common.StackingConfig().mode(looks.StackingMode.NORMAL).group("A"))
        panel.fill_opacity(60)
    if look.get("limits"):
        dashed = looks.GraphThresholdsStyleMode.DASHED
        panel.thresholds_style(common.GraphThresholdsStyleConfig().mode(dashed))
    return _series(panel.build(), title, description, _ranges(queries), look)


def number(title: str, description: str, query: Query, **look: Unpack[PanelSize]) -> models.Panel:
    """Return the newest value, coloured by its limits, over its history."""
    panel = stat.Panel().color_mode(looks.BigValueColorMode.VALUE).reduce_options(_newest())
    adds_up = "$__range" in query.promql
    panel.graph_mode(looks.BigValueGraphMode.NONE if adds_up else looks.BigValueGraphMode.AREA)
    targets = [_instant(query)] if adds_up else _ranges([query])
    size: PanelSize = {"width": 4, "height": 4}
    return _series(panel.build(), title, description, targets, size | look)


def bars(title: str, description: str, query: Query, **look: Unpack[PanelSize]) -> models.Panel:
    """Return a bar for each series, by its total over the time range."""
    panel = (
        bargauge.Panel()
        .orientation(looks.VizOrientation.HORIZONTAL)
        .display_mode(looks.BarGaugeDisplayMode.BASIC)
        .reduce_options(_newest())
    )
    return _series(panel.build(), title, description, [_instant(query)], look)


def heat_map(title: str, description: str, query: Query, **look: Unpack[PanelSize]) -> models.Panel:
    """Return a line of cells for each series, in the order of their labels."""
    colors = (
        HeatmapColorOptions().mode(HeatmapColorMode.SCHEME).scheme("Turbo").reverse(False).steps(64)
    )
    panel = (
        heatmap.Panel()
        .calculate(False)
        .cell_gap(0)
        .color(colors)
        .cell_values(CellValues().unit(look.get("unit", "none")))
        .show_legend()
    )
    return _series(panel.build(), title, description, _ranges([query]), look)


def complete(
    panel: models.Panel,
    title: str,
    description: str,
    targets: Sequence[prometheus.Dataquery],
    look: PanelSize,
) -> models.Panel:
    """Set the options that all kinds of panel share; the page completes gridPos."""
    panel.title, panel.description, panel.datasource = title, description, SOURCE
    panel.grid_pos = models.GridPos(h=look.get("height", 8), w=look.get("width", 0))
    panel.targets = []
    for letter, target in zip(ascii_uppercase, targets, strict=False):
        panel.targets.append(target.datasource(SOURCE).ref_id(letter).build())
    panel.field_config = panel.field_config or models.FieldConfigSource()
    defaults = panel.field_config.defaults
    defaults.unit = look.get("unit", "none")
    defaults.min_val, defaults.max_val = look.get("minimum"), look.get("maximum")
    defaults.thresholds = thresholds(look.get("limits") or [(None, GREEN)])
    defaults.links = [
        models.DashboardLink(title=link.title, url=link.url) for link in look.get("links", ())
    ]
    return panel


def thresholds(limits: Limits) -> models.ThresholdsConfig:
    steps = [models.Threshold(value=value, color=color) for value, color in limits]
    return models.ThresholdsConfig(mode=models.ThresholdsMode.ABSOLUTE, steps=steps)


def _lines() -> timeseries.Panel:
    legend = common.VizLegendOptions().display_mode(looks.LegendDisplayMode.LIST)
    tooltip = common.VizTooltipOptions().mode(looks.TooltipDisplayMode.MULTI)
    return (
        timeseries.Panel()
        .line_width(1)
        .fill_opacity(0)
        .show_points(looks.VisibilityMode.AUTO)
        # Where Prometheus has nothing there is nothing: no line from one anomaly to the next.
        .insert_nulls(True)
        .legend(legend.placement(looks.LegendPlacement.BOTTOM).show_legend(True).calcs([]))
        .tooltip(tooltip.sort(looks.SortOrder.DESCENDING))
    )


def _series(
    panel: models.Panel,
    title: str,
    description: str,
    targets: Sequence[prometheus.Dataquery],
    look: PanelSize,
) -> models.Panel:
    panel.transformations = [SHORT_NODE]
    return complete(panel, title, description, targets, look)


def _ranges(queries: Sequence[Query]) -> list[prometheus.Dataquery]:
    return [_target(query).range() for query in queries]


def _instant(query: Query) -> prometheus.Dataquery:
    return _target(query).instant()


def _target(query: Query) -> prometheus.Dataquery:
    return (
        prometheus.Dataquery()
        .expr(query.promql)
        .legend_format(query.legend)
        .format(PromQueryFormat.TIME_SERIES)
    )


def _newest() -> common.ReduceDataOptions:
    return common.ReduceDataOptions().calcs(["lastNotNull"]).values(False).fields("")


# In the order of the columns.
_TITLES = {
    "kind": "Kind",
    "severity": "Severity",
    "summary": "What",
    "scope": "Scope",
    "xid": "XID",
    "reason": "Reason",
    "trigger": "Trigger",
    "outcome": "Outcome",
    "source": "Source",
    "training_job": "Job",
    "run": "Run",
    "rank": "Rank",
    "owner": "Owner",
    "user": "User",
    "cluster": "Cluster",
    "node": "Node",
    "instance": "Agent",
    "version": "Version",
    "gpu": "GPU",
    "profile": "Profile",
    "gpu_instance": "Instance",
    "namespace": "Namespace",
    "pod": "Pod",
    "container": "Container",
    "slurm_job": "Slurm job",
    "account": "Account",
    "partition": "Partition",
    "host": "Host",
    "local_rank": "Local rank",
    "name": "Model",
    "driver_version": "Driver",
    "framework": "PyTorch",
    "step_clock": "Step clock",
    "method": "MFU by",
    "device": "Device",
    "uuid": "UUID",
}


@dataclass(frozen=True, slots=True)
class Column:
    """A query's value; without a title only its labels are shown, as of a series that is always 1.

    All columns of a table join by the labels that they share.
    """

    promql: str
    title: str = ""
    unit: str = "none"
    limits: Limits = ()


def table(
    title: str,
    description: str,
    columns: Sequence[Column],
    *,
    hidden: Sequence[str] = (),
    sorted_by: str = "",
    **look: Unpack[PanelSize],
) -> models.Panel:
    """``look["links"]`` are on every value of a line; ``sorted_by``: a column, lowest first."""
    targets = [_column_target(column) for column in columns]
    empty = builders.Panel().cell_options(TableAutoCellOptions()).min_width(60).build()
    assert isinstance(empty.options, TableOptions)
    # The builder's footer is that of Grafana before 12.
    empty.options.footer = None
    if sorted_by:
        empty.options.sort_by = [TableSortByFieldState(sorted_by, desc=False)]
    panel = complete(empty, title, description, targets, look)
    panel.transformations = [
        models.DataTransformerConfig(id_val="merge", options={}),
        models.DataTransformerConfig(id_val="organize", options=_organized(columns, hidden)),
    ]
    assert panel.field_config is not None
    panel.field_config.overrides = [_override(column) for column in columns if column.title]
    return panel


def newest_diagnosis(description: str) -> models.Panel:
    """Return the findings of the chosen jobs' newest captures, with their shares."""
    shares = f"max by ({BY_JOB}, finding) ({series('diagnosis_share_ratio', JOB)})"
    return bars(
        "Newest diagnosis",
        f"{description} {EMPTY_WHEN_HEALTHY}",
        Query(shares, f"{JOB_LEGEND} {{{{finding}}}}"),
        unit="percentunit",
        minimum=0,
        maximum=1,
    )


def anomalies_now(what: str, width: int = 0) -> models.Panel:
    """Return the active anomalies of the chosen jobs; ``what``: a job or a server."""
    return table(
        "Anomalies now",
        f"What is wrong with the {what} now. The agent's page has the evidence and the capture. "
        f"{EMPTY_WHEN_HEALTHY}",
        [Column(f"{anomalies(OF_JOB)} == 1")],
        hidden=["__name__", "job", "gpu", "uuid", "link"],
        links=[node_of_row()],
        width=width,
    )


def _column_target(column: Column) -> prometheus.Dataquery:
    query = prometheus.Dataquery().expr(column.promql).legend_format("")
    return query.format(PromQueryFormat.TABLE).instant()


def _organized(columns: Sequence[Column], hidden: Sequence[str]) -> dict[str, object]:
    # A lone query's value has no letter.
    letters = [f" #{letter}" for letter in ascii_uppercase] if len(columns) > 1 else [""]
    values = {
        f"Value{letter}": column.title for letter, column in zip(letters, columns, strict=False)
    }
    unshown = ["Time", *hidden, *(name for name, title in values.items() if not title)]
    order = [*_TITLES, *values]
    return {
        "excludeByName": {name: True for name in unshown},
        "indexByName": {name: place for place, name in enumerate(order)},
        "renameByName": _TITLES | {name: title for name, title in values.items() if title},
    }


def _override(column: Column) -> models.DashboardFieldConfigSourceOverrides:
    properties = [models.DynamicConfigValue(id_val="unit", value=column.unit)]
    if column.limits:
        colored = {"type": "color-text"}
        properties += [
            models.DynamicConfigValue(id_val="custom.cellOptions", value=colored),
            models.DynamicConfigValue(id_val="thresholds", value=thresholds(column.limits)),
        ]
    matcher = models.MatcherConfig(id_val="byName", options=column.title)
    return models.DashboardFieldConfigSourceOverrides(matcher=matcher, properties=properties)
