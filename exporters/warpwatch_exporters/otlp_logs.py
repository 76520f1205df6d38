"""Events as OpenTelemetry's log records, with the trace context that joins a fault's own.

An anomaly, the captures that it asked for and their verdicts are one trace; each anomaly and each
capture is a span of it. Both ids are hashes, the same after a restart.
"""

from __future__ import annotations

from hashlib import blake2b

from opentelemetry._logs import LogRecord, SeverityNumber
from opentelemetry.context import Context
from opentelemetry.sdk._logs import ReadableLogRecord
from opentelemetry.sdk.resources import Resource
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, set_span_in_context

from warpwatch_exporters.events import Event
from warpwatch_exporters.exposition import encodable
from warpwatch_exporters.otlp_metrics import SCOPE

MAX_BODY_CHARS = 1000
_SEVERITIES = {
    "info": SeverityNumber.INFO,
    "warning": SeverityNumber.WARN,
    "critical": SeverityNumber.ERROR,
}


def log_record(event: Event, node: str, resource: Resource, now: float) -> ReadableLogRecord:
    """``node``: whose ids they are. ``now``: wall clock in seconds."""
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
        attributes={f"warpwatch.{name}": _plain(value) for name, value in event.facts.items()},
        event_name=f"warpwatch.{event.name}",
    )
    return ReadableLogRecord(record, resource, SCOPE)


def _context(node: str, trace: str, span: str) -> Context:
    trace_id = int.from_bytes(blake2b(f"{node}/{trace}".encode(), digest_size=16).digest())
    span_id = int.from_bytes(blake2b(f"{node}/{span}".encode(), digest_size=8).digest())
    context = SpanContext(trace_id, span_id, is_remote=False, trace_flags=TraceFlags(1))
    return set_span_in_context(NonRecordingSpan(context))


def _plain(value: str | int | float) -> str | int | float:
    return encodable(value) if isinstance(value, str) else value
