"""What the daemon counts about itself: the catalogue's names and labels, from any thread."""

from __future__ import annotations

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from tests.daemon.state.counted import counted
from warpwatch_daemon.state.agent_metrics import MAX_OWNERS, AgentMetrics
from warpwatch_daemon.state.hub import Hub
from warpwatch_telemetry.catalogue import CATALOGUE


def test_a_source_counts_by_name_and_labels():
    hub = Hub(4.0)
    hub.count("nvml_calls_total", "power")
    hub.count("nvml_calls_total", "power", by=4)
    hub.count("nvml_calls_total", "clocks")
    hub.count("jsonl_errors_total", by=2)
    assert counted(hub, "nvml_calls_total", "power") == 5
    assert counted(hub, "nvml_calls_total", "clocks") == 1
    assert counted(hub, "jsonl_errors_total") == 2
    with pytest.raises(KeyError):
        hub.count("made_up_total")


def test_what_nothing_has_counted_yet_is_absent():
    metrics = AgentMetrics()
    assert generate_latest(metrics.registry) == b""
    metrics.counter("jsonl_errors_total")
    assert b"warpwatch_jsonl_errors_total 0.0" in generate_latest(metrics.registry)


@pytest.mark.parametrize("name", sorted(n for n, row in CATALOGUE.items() if row.scope == "agent"))
def test_every_metric_is_shown_as_the_catalogue_describes_it(name):
    row, metrics = CATALOGUE[name], AgentMetrics()
    metric = metrics.counter(name) if row.kind == "counter" else metrics.gauge(name)
    values = [f"some {label}" for label in row.labels]
    (metric.labels(*values) if values else metric).inc()
    # No second series says since when a counter counts.
    (family,) = text_string_to_metric_families(generate_latest(metrics.registry).decode())
    (sample,) = family.samples
    assert (family.type, family.documentation) == (row.kind, row.help)
    assert (sample.name, sample.value) == (row.full_name, 1)
    assert sample.labels == dict(zip(row.labels, values, strict=True))


def test_what_another_part_keeps_is_read_at_each_scrape():
    hub = Hub(4.0)
    durations_s = {"pipeline": 0.25, "host": 0.5}
    suppressed = {("hang", "crash"): 1}
    hub.metrics.read("loop_duration_seconds", lambda: durations_s)
    hub.metrics.read("anomalies_suppressed_total", lambda: suppressed)
    assert counted(hub, "loop_duration_seconds", "host") == 0.5
    assert counted(hub, "anomalies_suppressed_total", "hang", "crash") == 1
    del durations_s["host"]
    suppressed["hang", "crash"] = 2
    assert counted(hub, "loop_duration_seconds", "host") is None
    assert counted(hub, "anomalies_suppressed_total", "hang", "crash") == 2


def test_captures_are_counted_by_whose_they_are_up_to_a_number_of_owners():
    metrics = AgentMetrics()
    for owner in ("ns/ml", "uid/1000", *(f"uid/{2000 + one}" for one in range(MAX_OWNERS))):
        metrics.count_capture("torch", "manual", "complete", owner)
    said = metrics.registry.get_sample_value
    labels = {"kind": "torch", "trigger": "manual", "outcome": "complete"}
    name = "warpwatch_captures_total"
    assert said(name, labels | {"namespace": "ml", "user": ""}) == 1
    assert said(name, labels | {"namespace": "", "user": "1000"}) == 1
    # Of those beyond the limit.
    assert said(name, labels | {"namespace": "", "user": ""}) == 2
