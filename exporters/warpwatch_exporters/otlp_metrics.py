"""Families of prometheus_client as OpenTelemetry's metrics: names, labels and values as /metrics
has them. A Prometheus that receives them gives them the same names again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise

from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    Histogram,
    HistogramDataPoint,
    Metric,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from prometheus_client.core import Metric as MetricFamily
from prometheus_client.samples import Sample

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
    """``time``: wall clock in seconds."""
    time_ns = int(time * 1e9)
    metrics = [_metric(family, time_ns) for family in families if family.samples]
    return MetricsData([ResourceMetrics(resource, [ScopeMetrics(SCOPE, metrics, "")], "")])


def _metric(family: MetricFamily, time_ns: int) -> Metric:
    if family.type == "histogram":
        data: Sum | Gauge | Histogram = Histogram(list(_histograms(family, time_ns)), _CUMULATIVE)
    else:
        points = [
            NumberDataPoint(sample.labels, _UNKNOWN_START, time_ns, sample.value)
            for sample in family.samples
        ]
        is_counter = family.type == "counter"
        data = Sum(points, _CUMULATIVE, is_monotonic=True) if is_counter else Gauge(points)
    return Metric(family.name, family.documentation, UNITS.get(family.unit, ""), data)


def _histograms(family: MetricFamily, time_ns: int) -> Iterator[HistogramDataPoint]:
    """One of each set of labels; its buckets come in order, cumulated, the last without bound."""
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
