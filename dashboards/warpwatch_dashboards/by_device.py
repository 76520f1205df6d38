"""The panels of *Node and GPUs* about one metric: a series for each device."""

from __future__ import annotations

from typing import Unpack

from grafana_foundation_sdk.models import dashboard as models

from warpwatch_dashboards.panels import EMPTY_WHEN_HEALTHY, PanelSize, graph
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


def as_it_is(
    title: str, description: str, name: str, label: str = "", **look: Unpack[PanelSize]
) -> models.Panel:
    """Graph a metric of each device, by one label of its own."""
    return graph(title, description, by_device(series(name, DEVICE), label), **look)


def per_second(
    title: str, description: str, name: str, label: str = "", **look: Unpack[PanelSize]
) -> models.Panel:
    """Graph a counter of each device per second, by one label of its own."""
    return graph(title, description, by_device(rate(series(name, DEVICE)), label), **look)


def share(
    title: str, description: str, name: str, label: str = "", **look: Unpack[PanelSize]
) -> models.Panel:
    whole: PanelSize = {"unit": "percentunit", "maximum": 1}
    return as_it_is(title, description, name, label, **(whole | look))


def events(
    title: str, description: str, name: str, label: str = "", *, width: int = 6
) -> models.Panel:
    """Graph the growth of a counter of rare events; without growth there is no line."""
    by = f"{DEVICE_KEY}, {label}" if label else DEVICE_KEY
    expression = total(by, grown(series(name, DEVICE), WINDOW))
    described = f"{description} {EMPTY_WHEN_HEALTHY}"
    return graph(title, described, by_device(expression, label), width=width)


def by_device(expression: str, label: str) -> Query:
    return Query(expression, f"{GPU_LEGEND} {{{{{label}}}}}" if label else GPU_LEGEND)
