"""Runs the configured exporters that push, each in a loop; others are not imported."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence

from warpwatch_exporters.collector import StateCollector
from warpwatch_exporters.config import ExportersConfig
from warpwatch_exporters.events import EventFeed, StateEvent
from warpwatch_runtime.agent_metrics import AgentMetrics
from warpwatch_runtime.supervisor import Supervisor, run_all
from warpwatch_telemetry.anomalies import Anomaly
from warpwatch_telemetry.errors import UsageError
from warpwatch_telemetry.state import State

INTERVAL_S = 2.0
# The wait at the end for peers that do not reply.
LAST_TIMEOUT_S = 2.0

Send = Callable[[Iterable[StateEvent]], None]


class PushExporters:
    """The configured exporters that push. Raises UsageError.

    service: ``warpwatch`` or ``warpwatch-fleet``. exported: the state whose series are exported;
    own_state: the state with the events that this process reports.
    """

    def __init__(
        self,
        config: ExportersConfig,
        node: str,
        service: str,
        public_url: str,
        metrics: AgentMetrics,
        exported: Callable[[], State],
        own_state: Callable[[], State],
    ) -> None:
        ways = dict(_webhooks(config, node, public_url, metrics)) if config.webhooks else {}
        if config.otlp.endpoint is not None:
            ways["otlp"] = _otlp(config, node, service, metrics, exported)
        self._all = {name: _PushLoop(send, own_state) for name, send in ways.items()}

    def start(self, supervisor: Supervisor) -> None:
        for name, way in self._all.items():
            supervisor.every(name, INTERVAL_S, way.advance)

    def know(self, anomalies: Sequence[Anomaly]) -> None:
        """Report no event of these, which another process has reported; may wait for a peer."""
        for way in self._all.values():
            way.know(anomalies)

    @property
    def last_words(self) -> dict[str, Callable[[], None]]:
        """The final writes at the end of the process, by name."""
        return {name: way.last for name, way in self._all.items()}

    def close(self) -> None:
        run_all(self.last_words, LAST_TIMEOUT_S)


class _PushLoop:
    def __init__(self, send: Send, own_state: Callable[[], State]) -> None:
        self._send = send
        self._own_state = own_state
        self._events = EventFeed(own_state())
        self._busy = threading.Lock()

    def advance(self) -> None:
        with self._busy:
            self._send(self._events.drain(self._own_state()))

    def know(self, anomalies: Sequence[Anomaly]) -> None:
        with self._busy:
            self._events.know(anomalies)

    def last(self) -> None:
        """Send the last events, unless the loop still waits for the peer."""
        if self._busy.acquire(blocking=False):
            self._busy.release()
            self.advance()


def _webhooks(
    config: ExportersConfig, node: str, public_url: str, metrics: AgentMetrics
) -> Iterator[tuple[str, Send]]:
    from warpwatch_exporters import webhooks

    messages = metrics.counter("webhook_messages_total")
    for result in webhooks.RESULTS:
        # Each series exists from the start, so that an increase can be seen.
        messages.labels(result)

    def count(result: str) -> None:
        messages.labels(result).inc()

    for number, wanted in enumerate(config.webhooks):
        name = f"exporters.webhooks[{number}]"
        webhook = webhooks.WebhookExporter(wanted, name, node, public_url, count)
        yield f"webhook-{number}", webhook.advance


def _otlp(
    config: ExportersConfig,
    node: str,
    service: str,
    metrics: AgentMetrics,
    exported: Callable[[], State],
) -> Send:
    try:
        from warpwatch_exporters import otlp
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("opentelemetry"):
            raise
        raise UsageError(
            "exporters.otlp needs the OpenTelemetry SDK: install the extra warpwatch[otlp]"
        ) from error
    counter = metrics.counter("otlp_exports_total")
    for signal, result in itertools.product(("metrics", "logs"), otlp.RESULTS):
        counter.labels(signal, result)
    inline = config.prometheus.workload_labels == "inline"
    of_state = StateCollector(exported, config.prometheus.profile, inline_workloads=inline)
    about = {"service.name": service, "service.version": exported().version}
    return otlp.OtlpExporter(
        config.otlp,
        lambda: itertools.chain(of_state.collect(), metrics.registry.collect()),
        # A fleet's process continues what another one has reported.
        node if service == "warpwatch" else service,
        {**about, "service.instance.id": node, "host.name": node},
        lambda signal, result, count: counter.labels(signal, result).inc(count),
    ).advance
