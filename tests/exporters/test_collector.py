"""The state for a registry of prometheus_client: what the daemon's own page says of it."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from tests.exporters.states import TIME, full_state, odd_state
from warpwatch_exporters.collector import StateCollector
from warpwatch_exporters.prometheus import render
from warpwatch_telemetry.state import State


def registry_of(state: State) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(StateCollector(lambda: state))
    return registry


def families(page: bytes) -> dict[str, object]:
    return {
        family.name: (
            *(family.type, family.documentation),
            {(s.name, frozenset(s.labels.items())): s.value for s in family.samples},
        )
        for family in parse_text(page.decode())
    }


@pytest.mark.parametrize("state", [full_state(), odd_state(), State(TIME, "1", "h")])
def test_it_has_the_same_families_and_samples_as_the_page(state: State) -> None:
    shown = families(generate_latest(registry_of(state)))
    assert shown == families(render(state))
    assert shown["warpwatch_build_info"]


def test_it_has_the_same_units_in_openmetrics() -> None:
    def units(page: bytes) -> dict[str, str]:
        families = parse_openmetrics(page.decode())  # type: ignore[no-untyped-call]
        return {family.name: family.unit for family in families}

    shown = units(openmetrics.generate_latest(registry_of(full_state())))  # type: ignore[no-untyped-call]
    assert shown == units(render(full_state(), openmetrics=True) + b"# EOF\n")
    assert shown["warpwatch_device_energy_joules"] == "joules"


def test_each_scrape_asks_for_the_state_again() -> None:
    states = iter((full_state(), State(TIME, "1", "h")))
    registry = CollectorRegistry()
    registry.register(StateCollector(lambda: next(states)))
    assert b"warpwatch_steps_total{" in generate_latest(registry)
    assert b"warpwatch_steps_total{" not in generate_latest(registry)
