"""Annotations in Grafana, where its URL is configured."""

from __future__ import annotations

from typing import TYPE_CHECKING

from warpwatch_daemon.config.sections import Config
from warpwatch_daemon.state.agent_metrics import AgentMetrics

if TYPE_CHECKING:
    from warpwatch_exporters.grafana import GrafanaAnnotations


def follower(config: Config, node: str, metrics: AgentMetrics) -> GrafanaAnnotations | None:
    """None where it is not wanted; what it needs is loaded only where it is."""
    wanted = config.exporters.grafana
    if wanted.url is None:
        return None
    from warpwatch_exporters import grafana, grafana_api

    annotations = metrics.counter("grafana_annotations_total")
    for result in grafana.RESULTS:
        # There from the start, so that an increase can be seen.
        annotations.labels(result)
    return grafana.GrafanaAnnotations(
        grafana_api.GrafanaApi(wanted.url, wanted.token_file, wanted.ca_file),
        grafana.Annotations(node, config.http.public_url_of(node)),
        lambda result: annotations.labels(result).inc(),
    )
