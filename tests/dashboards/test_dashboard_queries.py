"""What the dashboards ask Prometheus for."""

from __future__ import annotations

import promql_parser as promql
import pytest

from tests.dashboards.expressions import (
    NAMES,
    dashboards,
    expressions,
    panels,
    substituted,
)
from tests.dashboards.promql_labels import labels_of

DASHBOARDS = dashboards()


@pytest.mark.parametrize("name", NAMES)
def test_metrics_and_labels_exist(name: str) -> None:
    asked = list(expressions(DASHBOARDS[name]))
    assert len(asked) > 30
    for expression in asked:
        found = labels_of(promql.parse(expression.promql))
        assert set(expression.labels) <= found, expression.where


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ("warpwatch_device_tremble", "does not exist"),
        ("rate(warpwatch_step_duration_seconds[5m])", "is a histogram"),
        ('warpwatch_device_up{rank="1"}', "has no"),
        ("sum by (rank) (warpwatch_device_up)", "no"),
        ("warpwatch_device_up * on (rank) warpwatch_rank_up", "both sides"),
        ('label_replace(warpwatch_device_up, "uuid", "$1", "device", "(.+)")', "no device"),
    ],
)
def test_what_does_not_exist_is_found(wrong: str, why: str) -> None:
    with pytest.raises(AssertionError, match=why):
        labels_of(promql.parse(wrong))


@pytest.mark.parametrize("name", NAMES)
def test_rates_take_the_interval_from_grafana(name: str) -> None:
    for panel in panels(DASHBOARDS[name]):
        for target in panel["targets"]:
            for part in target["expr"].split("rate(")[1:]:
                window = part.split("[", 1)[1].split("]", 1)[0]
                assert window in {"$__rate_interval", "$__range"}, panel["title"]


@pytest.mark.parametrize("name", NAMES)
def test_every_query_takes_the_variables(name: str) -> None:
    for panel in panels(DASHBOARDS[name]):
        for target in panel["targets"]:
            for variable in ("$cluster", "$node", "$instance"):
                assert f'=~"{variable}"' in target["expr"], panel["title"]


def test_a_variable_that_does_not_exist_is_an_error() -> None:
    assert substituted('up{a=~"$a"}[${b:raw}] "$1"', {"a": "x", "b": "5m"}) == 'up{a=~"x"}[5m] "$1"'
    with pytest.raises(KeyError, match="c"):
        substituted("$c", {})
