"""Ways out of the daemon, each in a loop: what is configured, which alone is loaded.

OpenTelemetry and webhooks tell of what has just happened, as annotations in Grafana do; captures
and summaries of runs go into the remote store.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from warpwatch_daemon.agent.supervisor import Supervisor
from warpwatch_daemon.captures.coordinator import Coordinator
from warpwatch_daemon.captures.store import Store
from warpwatch_daemon.config.sections import Config
from warpwatch_daemon.history.runs.run_table import RunTable
from warpwatch_daemon.state.agent_metrics import AgentMetrics
from warpwatch_devices.call_guard import run_all
from warpwatch_exporters.collector import StateCollector
from warpwatch_exporters.config import WebhookConfig
from warpwatch_exporters.events import Event, Events
from warpwatch_telemetry.errors import UsageError
from warpwatch_telemetry.state import State

INTERVAL_S = 2.0
# How long the end waits for those that do not answer.
LAST_TIMEOUT_S = 2.0


class WaysOut:
    """What is configured, which alone is loaded. Raises UsageError.

    service: ``warpwatch`` or ``warpwatch-fleet``. exported: the state whose series are exported;
    told: the state with what is ours to tell of.
    """

    def __init__(
        self,
        config: Config,
        node: str,
        service: str,
        public_url: str,
        metrics: AgentMetrics,
        exported: Callable[[], State],
        told: Callable[[], State],
    ) -> None:
        ways: dict[str, Callable[[Iterable[Event]], None]] = {}
        if config.exporters.otlp.endpoint is not None:
            ways["otlp"] = _otlp(config, node, service, metrics, exported)
        if config.exporters.webhooks:
            ways |= _webhooks(config, node, public_url, metrics)
        self._all = {name: _WayOut(send, told) for name, send in ways.items()}

    def start(self, supervisor: Supervisor) -> None:
        for name, way in self._all.items():
            supervisor.every(name, INTERVAL_S, way.advance)

    @property
    def last_words(self) -> dict[str, Callable[[], None]]:
        """What is to be done at the end, by name."""
        return {name: way.last for name, way in self._all.items()}

    def close(self) -> None:
        run_all(self.last_words, LAST_TIMEOUT_S)


class _WayOut:
    def __init__(self, send: Callable[[Iterable[Event]], None], told: Callable[[], State]) -> None:
        self._send = send
        self._told = told
        self._events = Events(told())
        self._busy = threading.Lock()

    def advance(self) -> None:
        with self._busy:
            self._send(self._events.take(self._told()))

    def last(self) -> None:
        """Unless the loop still waits for the other side."""
        if self._busy.acquire(blocking=False):
            self._busy.release()
            self.advance()


def _webhooks(
    config: Config, node: str, public_url: str, metrics: AgentMetrics
) -> dict[str, Callable[[Iterable[Event]], None]]:
    from warpwatch_exporters import webhooks

    messages = metrics.counter("webhook_messages_total")
    for result in webhooks.RESULTS:
        # There from the start, so that an increase can be seen.
        messages.labels(result)

    def webhook(number: int, wanted: WebhookConfig) -> webhooks.Webhook:
        return webhooks.Webhook(
            wanted,
            f"exporters.webhooks[{number}]",
            node,
            public_url,
            lambda result: messages.labels(result).inc(),
        )

    found = enumerate(config.exporters.webhooks)
    return {f"webhook-{number}": webhook(number, wanted).advance for number, wanted in found}


def _otlp(
    config: Config,
    node: str,
    service: str,
    metrics: AgentMetrics,
    exported: Callable[[], State],
) -> Callable[[Iterable[Event]], None]:
    try:
        from warpwatch_exporters import otlp
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("opentelemetry"):
            raise
        raise UsageError(
            "exporters.otlp needs the OpenTelemetry SDK: pip install 'warpwatch[otlp]'"
        ) from error
    counter = metrics.counter("otlp_exports_total")
    for signal, result in itertools.product(("metrics", "logs"), otlp.RESULTS):
        counter.labels(signal, result)
    of_state = StateCollector(exported, config.exporters.prometheus.profile)
    return otlp.OtlpExporter(
        config.exporters.otlp,
        lambda: itertools.chain(of_state.collect(), metrics.registry.collect()),
        node,
        {
            "service.name": service,
            "service.version": exported().version,
            "service.instance.id": node,
            "host.name": node,
        },
        lambda signal, result, count: counter.labels(signal, result).inc(count),
    ).advance


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
    coordinator: Coordinator,
    runs: RunTable,
    metrics: AgentMetrics,
    node: str,
    environ: Mapping[str, str],
) -> Callable[[], None] | None:
    """What a loop is to do for the remote store; None where there is none. Raises UsageError."""
    url = config.remote_store.url
    if url is None:
        return None
    from warpwatch_daemon.history.remote_store import RemoteStore
    from warpwatch_daemon.history.runs.run_uploads import RunUploads
    from warpwatch_daemon.history.uploads import Uploads

    remote = RemoteStore(url, environ)
    register, is_settled = coordinator.register, coordinator.is_settled
    of_captures = Uploads(remote, store.path, register, is_settled, metrics, node)
    of_runs = RunUploads(remote, runs, metrics)

    def advance() -> None:
        of_captures.advance()
        of_runs.advance()

    return advance
