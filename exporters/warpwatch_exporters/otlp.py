"""Exports to an OpenTelemetry collector: metrics at an interval, events as log records at once.

Metrics that could not be sent are not sent again: the next ones contain more.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from hashlib import blake2b
from itertools import pairwise
from typing import Any, Literal

from opentelemetry._logs import LogRecord, SeverityNumber
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http import Compression
from opentelemetry.exporter.otlp.proto.http._log_exporter import OTLPLogExporter
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.sdk._logs import ReadableLogRecord
from opentelemetry.sdk._logs.export import LogRecordExportResult
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    Histogram,
    HistogramDataPoint,
    Metric,
    MetricExportResult,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, set_span_in_context
from prometheus_client.core import Metric as MetricFamily
from prometheus_client.samples import Sample

from warpwatch_exporters.config import OtlpConfig
from warpwatch_exporters.events import StateEvent
from warpwatch_exporters.prometheus import encodable
from warpwatch_runtime.http_requests import RequestError, read_headers
from warpwatch_runtime.supervisor import Pause

logger = logging.getLogger(__name__)

MAX_BODY_CHARS = 1000
_SEVERITIES = {
    "info": SeverityNumber.INFO,
    "warning": SeverityNumber.WARN,
    "critical": SeverityNumber.ERROR,
}


def log_record(event: StateEvent, node: str, resource: Resource, now: float) -> ReadableLogRecord:
    """Return a log record; ``node`` owns its ids, ``now`` is the wall clock in seconds."""
    anomaly, capture = event.anomaly, event.capture
    opened = anomaly is not None and event.name == "anomaly_opened"
    severity = anomaly.severity if anomaly is not None and opened else "info"
    span = anomaly.id if anomaly else capture.id if capture else ""
    record = LogRecord(
        timestamp=int(event.time * 1e9),
        observed_timestamp=int(now * 1e9),
        context=_context(node, event.anomaly_id or span, span),
        severity_text=severity,
        severity_number=_SEVERITIES[severity],
        body=encodable(event.summary[:MAX_BODY_CHARS]),
        attributes={
            f"warpwatch.{name}": encodable(value) if isinstance(value, str) else value
            for name, value in event.facts.items()
        },
        event_name=f"warpwatch.{event.name}",
    )
    return ReadableLogRecord(record, resource, SCOPE)


def _context(node: str, trace: str, span: str) -> Context:
    trace_id = int.from_bytes(blake2b(f"{node}/{trace}".encode(), digest_size=16).digest())
    span_id = int.from_bytes(blake2b(f"{node}/{span}".encode(), digest_size=8).digest())
    context = SpanContext(trace_id, span_id, is_remote=False, trace_flags=TraceFlags(1))
    return set_span_in_context(NonRecordingSpan(context))


SCOPE = InstrumentationScope("warpwatch")
# UCUM, as OpenTelemetry wants units.
UNITS = {
    "bytes": "By",
    "celsius": "Cel",
    "hertz": "Hz",
    "joules": "J",
    "ratio": "1",
    "seconds": "s",
    "watts": "W",
}
_CUMULATIVE = AggregationTemporality.CUMULATIVE
# When a counter began is not known: a device counts since its driver was loaded.
_UNKNOWN_START = 0


def metrics_data(families: Iterable[MetricFamily], resource: Resource, time: float) -> MetricsData:
    """Return the metrics at ``time`` (wall clock in seconds)."""
    time_ns = int(time * 1e9)
    metrics = [_metric(family, time_ns) for family in families if family.samples]
    return MetricsData([ResourceMetrics(resource, [ScopeMetrics(SCOPE, metrics, "")], "")])


def _metric(family: MetricFamily, time_ns: int) -> Metric:
    if family.type == "histogram":
        data: Sum | Gauge | Histogram = Histogram(list(_histograms(family, time_ns)), _CUMULATIVE)
    else:
        points = [
            # A boolean becomes a number: the SDK sends no batch that has one.
            NumberDataPoint(sample.labels, _UNKNOWN_START, time_ns, +sample.value)
            for sample in family.samples
        ]
        is_counter = family.type == "counter"
        data = Sum(points, _CUMULATIVE, is_monotonic=True) if is_counter else Gauge(points)
    return Metric(family.name, family.documentation, UNITS.get(family.unit, ""), data)


def _histograms(family: MetricFamily, time_ns: int) -> Iterator[HistogramDataPoint]:
    """Yield a histogram per set of labels, whose buckets come in order and cumulated."""
    points: dict[tuple[tuple[str, str], ...], list[Sample]] = {}
    for sample in family.samples:
        labels = tuple(one for one in sample.labels.items() if one[0] != "le")
        points.setdefault(labels, []).append(sample)
    for labels, samples in points.items():
        buckets = [one for one in samples if one.name.endswith("_bucket")]
        total = next(one.value for one in samples if one.name.endswith("_sum"))
        counts = [0, *(int(one.value) for one in buckets)]
        bounds = [float(one.labels["le"]) for one in buckets[:-1]]
        own = [after - before for before, after in pairwise(counts)]
        yield HistogramDataPoint(
            dict(labels), _UNKNOWN_START, time_ns, counts[-1], total, own, bounds,
            min=None, max=None,  # type: ignore[arg-type]  # not known, and optional in the protocol
        )  # fmt: skip


# Beyond these the oldest are dropped: about 2 MB.
MAX_WAITING = 1000
MAX_BATCH = 200
# The limit of a request with its repetitions, and of the wait when the daemon stops.
TIMEOUT_S = 3.0

Signal = Literal["metrics", "logs"]
# Labels of ``warpwatch_otlp_exports_total``: requests with metrics, and log records.
RESULTS = ("sent", "failed", "dropped")


class FirstMessage(logging.Handler):
    """Keeps the first message of a request: the SDK returns that it failed, and logs why."""

    text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text = self.text or record.getMessage().rstrip(".")


class OtlpExporter:
    """An OTLP exporter. ``advance`` needs its own loop, as it may wait; ``count`` gets RESULTS.

    families: the metrics. node: the owner of the events.
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
        self._said = FirstMessage()
        # The SDK logs every try; we log a failure once.
        sdk = logging.getLogger("opentelemetry.exporter")
        sdk.handlers, sdk.propagate = [self._said], False

    def advance(self, events: Iterable[StateEvent]) -> None:
        """Queue the new events and send what is due."""
        self._queue(events)
        if self._pause.lasts:
            return
        try:
            self._send()
        except RequestError as error:
            if self._pause.begin():
                logger.warning("exporters.otlp: %s; trying again", error)
        else:
            self._pause.reset()

    def _queue(self, events: Iterable[StateEvent]) -> None:
        now = self._wall()
        self._waiting.extend(log_record(event, self._node, self._resource, now) for event in events)
        dropped = max(0, len(self._waiting) - MAX_WAITING)
        for _ in range(dropped):
            self._waiting.popleft()
        if dropped:
            self._count("logs", "dropped", dropped)

    def _send(self) -> None:
        """Send metrics that are due, and waiting events. Raises RequestError."""
        try:
            metrics, logs = self._current()
        except RequestError:
            self._count("metrics", "failed", 1)
            raise
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
        reason, self._said.text = self._said.text, ""
        if not sent:
            raise RequestError(f"{self._config.endpoint} takes no {signal}: {reason}")

    def _current(self) -> tuple[OTLPMetricExporter, OTLPLogExporter]:
        """Return exporters with the present headers. Raises RequestError."""
        headers = read_headers(self._config.headers_file)
        if self._exporters is None or headers != self._headers:
            url = str(self._config.endpoint).rstrip("/")
            how: Any = {"headers": headers, "timeout": TIMEOUT_S, "compression": Compression.Gzip}
            metrics = OTLPMetricExporter(f"{url}/v1/metrics", **how)
            self._exporters = metrics, OTLPLogExporter(f"{url}/v1/logs", **how)
            self._headers = headers
        return self._exporters
