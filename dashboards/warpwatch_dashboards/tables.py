"""Tables: a line for each combination of labels, a column for each query."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from string import ascii_uppercase
from typing import Unpack

from grafana_foundation_sdk.builders import prometheus
from grafana_foundation_sdk.builders import table as builders
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models.common import TableAutoCellOptions, TableSortByFieldState
from grafana_foundation_sdk.models.prometheus import PromQueryFormat
from grafana_foundation_sdk.models.table import Options as TableOptions

from warpwatch_dashboards.panels import Limits, PanelSize, complete, thresholds

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
    targets = [_target(column) for column in columns]
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


def _target(column: Column) -> prometheus.Dataquery:
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
