"""Ways out of the daemon, each in a loop: what is configured, which alone is loaded.

OpenTelemetry and webhooks tell of what has just happened, as annotations in Grafana do; captures
and summaries of runs go into the remote store.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from warpwatch_capturing.service import CaptureService
from warpwatch_capturing.store import Store
from warpwatch_daemon.config.sections import Config
from warpwatch_daemon.history.runs.run_table import RunTable
from warpwatch_runtime.agent_metrics import AgentMetrics

if TYPE_CHECKING:
    from warpwatch_exporters.grafana import GrafanaAnnotations


def grafana_follower(config: Config, node: str, metrics: AgentMetrics) -> GrafanaAnnotations | None:
    """Annotations in Grafana; None where they are not wanted."""
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


def uploads(
    config: Config,
    store: Store,
    service: CaptureService,
    runs: RunTable,
    metrics: AgentMetrics,
    node: str,
    environ: Mapping[str, str],
) -> Callable[[], None] | None:
    """What a loop is to do for the remote store; None where there is none. Raises UsageError."""
    url = config.remote_store.url
    if url is None:
        return None
    from warpwatch_capturing.remote.remote_store import RemoteStore
    from warpwatch_capturing.remote.uploads import Uploads
    from warpwatch_daemon.history.runs.run_uploads import RunUploads

    remote = RemoteStore(url, environ)
    register, is_settled = service.register, service.is_settled
    of_captures = Uploads(remote, store.path, register, is_settled, metrics, node)
    of_runs = RunUploads(remote, runs, metrics)

    def advance() -> None:
        of_captures.advance()
        of_runs.advance()

    return advance
