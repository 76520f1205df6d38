"""Metrics and events to an OpenTelemetry collector, over OTLP/HTTP.

What could not be sent of the metrics is not sent again: the next ones say more. Logs wait in a
queue of bounded length.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Literal

from opentelemetry.exporter.otlp.proto.http import Compression
from opentelemetry.exporter.otlp.proto.http._log_exporter import OTLPLogExporter
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.sdk._logs import ReadableLogRecord
from opentelemetry.sdk._logs.export import LogRecordExportResult
from opentelemetry.sdk.metrics.export import MetricExportResult
from opentelemetry.sdk.resources import Resource
from prometheus_client.core import Metric as MetricFamily

from warpwatch_exporters.config import OtlpConfig
from warpwatch_exporters.events import Event
from warpwatch_exporters.otlp_logs import log_record
from warpwatch_exporters.otlp_metrics import metrics_data
from warpwatch_runtime.http_requests import RequestError, read_headers
from warpwatch_runtime.pause import Pause

logger = logging.getLogger(__name__)

# Beyond these the oldest are dropped: some 2 MB.
MAX_WAITING = 1000
MAX_BATCH = 200
# Of one request with its repetitions; the end of the daemon waits for no more.
TIMEOUT_S = 3.0

Signal = Literal["metrics", "logs"]
# Of ``warpwatch_otlp_exports_total``: requests with metrics, and log records.
RESULTS = ("sent", "failed", "dropped")


class OtlpExporter:
    """``advance`` has a loop of its own, since it may wait; ``count`` gets each of RESULTS.

    families: what the metrics are. node: whose events they are.
    """

    def __init__(
        self,
        config: OtlpConfig,
        families: Callable[[], Iterable[MetricFamily]],
        node: str,
        service: Mapping[str, str],
        count: Callable[[Signal, str, int], None],
        monotonic: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._config = config
        self._families = families
        self._node = node
        self._count = count
        self._monotonic = monotonic
        self._wall = wall
        self._resource = Resource(dict(service))
        self._waiting: deque[ReadableLogRecord] = deque()
        self._metrics_due = float("-inf")
        self._pause = Pause(monotonic)
        self._headers: dict[str, str] | None = None
        self._exporters: tuple[OTLPMetricExporter, OTLPLogExporter] | None = None
        # It says the same of every try; we say it once.
        logging.getLogger("opentelemetry.exporter").setLevel(logging.CRITICAL)

    def advance(self, events: Iterable[Event]) -> None:
        """Take the new events and send what is due."""
        self._take(events)
        if self._pause.lasts:
            return
        try:
            self._send()
        except RequestError as error:
            if self._pause.begin():
                logger.warning("exporters.otlp: %s; trying again", error)
        else:
            self._pause.reset()

    def _take(self, events: Iterable[Event]) -> None:
        now = self._wall()
        self._waiting.extend(log_record(event, self._node, self._resource, now) for event in events)
        dropped = max(0, len(self._waiting) - MAX_WAITING)
        for _ in range(dropped):
            self._waiting.popleft()
        if dropped:
            self._count("logs", "dropped", dropped)

    def _send(self) -> None:
        """Raises RequestError."""
        metrics, logs = self._current()
        now = self._monotonic()
        if now >= self._metrics_due:
            self._metrics_due = now + self._config.interval_s
            data = metrics_data(self._families(), self._resource, self._wall())
            self._counted("metrics", 1, metrics.export(data) is MetricExportResult.SUCCESS)
        while self._waiting:
            batch = [self._waiting[at] for at in range(min(MAX_BATCH, len(self._waiting)))]
            self._counted("logs", len(batch), logs.export(batch) is LogRecordExportResult.SUCCESS)
            for _ in batch:
                self._waiting.popleft()

    def _counted(self, signal: Signal, items: int, sent: bool) -> None:
        self._count(signal, "sent" if sent else "failed", items)
        if not sent:
            raise RequestError(f"{self._config.endpoint} takes no {signal}")

    def _current(self) -> tuple[OTLPMetricExporter, OTLPLogExporter]:
        """With the headers as they are now. Raises RequestError."""
        headers = read_headers(self._config.headers_file)
        if self._exporters is None or headers != self._headers:
            url = str(self._config.endpoint).rstrip("/")
            gzip = Compression.Gzip
            try:
                self._exporters = (
                    OTLPMetricExporter(
                        f"{url}/v1/metrics", headers=headers, timeout=TIMEOUT_S, compression=gzip
                    ),
                    OTLPLogExporter(
                        f"{url}/v1/logs", headers=headers, timeout=TIMEOUT_S, compression=gzip
                    ),
                )
            except OSError as error:
                raise RequestError(str(error)) from error
            self._headers = headers
        return self._exporters
