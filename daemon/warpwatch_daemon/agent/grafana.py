"""Annotations in Grafana, where its URL is configured."""

from __future__ import annotations

from warpwatch_daemon.config.sections import Config
from warpwatch_daemon.state.hub import Hub
from warpwatch_exporters.base import Follower


def follower(config: Config, node: str, hub: Hub) -> Follower | None:
    """None where it is not wanted; what it needs is loaded only where it is."""
    wanted = config.exporters.grafana
    if wanted.url is None:
        return None
    from warpwatch_exporters import grafana, grafana_api

    for result in grafana.RESULTS:
        # There from the start, so that an increase can be seen.
        hub.count("grafana_annotations_total", result, by=0)
    public_url = config.http.public_url
    return grafana.GrafanaAnnotations(
        grafana_api.GrafanaApi(wanted.url, wanted.token_file, wanted.ca_file),
        grafana.Annotations(node, public_url and public_url.replace("{node}", node)),
        lambda result: hub.count("grafana_annotations_total", result),
    )
