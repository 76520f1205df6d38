"""A dashboard from rows of panels: places, numbers, and what all dashboards have in common."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from grafana_foundation_sdk.builders import dashboard as builders
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import dashboard as models

from warpwatch_dashboards import links

COLUMNS = 24
REFRESH = "30s"
Variable = (
    builders.QueryVariable
    | builders.DatasourceVariable
    | builders.CustomVariable
    | builders.TextBoxVariable
)


@dataclass(frozen=True, slots=True)
class Row:
    """Panels from left to right, in as many lines as their widths need.

    A collapsed row is queried when it is opened. ``width``: the width of panels without their own.
    """

    title: str
    panels: Sequence[models.Panel]
    collapsed: bool = False
    width: int = 8


@dataclass(frozen=True, slots=True)
class Page:
    uid: str
    title: str
    description: str
    variables: Sequence[Variable]
    annotations: Sequence[builders.AnnotationQuery]
    rows: Sequence[Row]

    def json(self) -> str:
        """Return the dashboard as JSON."""
        return json.dumps(self._model(), cls=JSONEncoder, indent=2, sort_keys=True) + "\n"

    def _model(self) -> models.Dashboard:
        dashboard = (
            builders.Dashboard(self.title)
            .uid(self.uid)
            .description(self.description)
            .tags([links.TAG])
            .timezone("browser")
            .tooltip(models.DashboardCursorSync.CROSSHAIR)
            .time("now-1h", "now")
            .refresh(REFRESH)
            .editable()
            .variables(list(self.variables))
            .annotations(list(self.annotations))
            .link(links.bar())
            .build()
        )
        dashboard.panels = list(placed(self.rows))
        assert dashboard.templating is not None
        for variable in dashboard.templating.list_val or ():
            # Only for interval variables; the builder sets them for all, Grafana's types for none.
            variable.auto = variable.auto_min = variable.auto_count = None
        return dashboard


def placed(rows: Sequence[Row]) -> Iterator[models.Panel | models.RowPanel]:
    """Yield the panels with their numbers and places on the grid."""
    number = y = 0
    for row in rows:
        number += 1
        place = models.GridPos(h=1, w=COLUMNS, x=0, y=y)
        head = models.RowPanel(title=row.title, grid_pos=place, id_val=number)
        inside, below = _lines(row, number + 1, y + 1)
        yield head
        if row.collapsed:
            head.collapsed, head.panels = True, inside
            y += 1
        else:
            yield from inside
            y = below
        number += len(inside)


def _lines(row: Row, number: int, y: int) -> tuple[list[models.Panel], int]:
    """Return the panels of a row from this number and height on, and the height below them."""
    x = line_height = 0
    there: list[models.Panel] = []
    for panel in row.panels:
        assert panel.grid_pos is not None
        panel.grid_pos.w = panel.grid_pos.w or row.width
        if x + panel.grid_pos.w > COLUMNS:
            x, y, line_height = 0, y + line_height, 0
        placed_panel = copy.copy(panel)
        placed_panel.id_val = number + len(there)
        size = panel.grid_pos
        placed_panel.grid_pos = models.GridPos(h=size.h, w=size.w, x=x, y=y)
        there.append(placed_panel)
        x += panel.grid_pos.w
        line_height = max(line_height, panel.grid_pos.h)
    return there, y + line_height
