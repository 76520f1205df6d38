"""Provides the daemon's own metrics, from prometheus_client.

Their names, help, labels and units are those of the catalogue, scope ``agent``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, disable_created_metrics
from prometheus_client.core import Metric as MetricFamily
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from warpwatch_telemetry.catalogue import CATALOGUE
from warpwatch_telemetry.jobs import whose
from warpwatch_telemetry.metric import Metric

# Captures of further owners are counted without an owner.
MAX_OWNERS = 64

_Kind = TypeVar("_Kind", Counter, Gauge)


class AgentMetrics:
    """The metrics, for any thread. Raises KeyError for one that is not in the catalogue.

    A metric is made on first use: one that nothing counts yet is absent, not 0.
    """

    def __init__(self) -> None:
        # The catalogue has no series for the creation times of others.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        self._lock = threading.Lock()
        self._made: dict[str, Counter | Gauge] = {}
        self._owners: set[str] = set()

    def counter(self, name: str) -> Counter:
        return self._metric(Counter, name)

    def gauge(self, name: str) -> Gauge:
        return self._metric(Gauge, name)

    def count_capture(self, kind: str, trigger: str, outcome: str, owner: str) -> None:
        with self._lock:
            if owner not in self._owners and len(self._owners) >= MAX_OWNERS:
                owner = ""
            self._owners.add(owner)
        self.counter("captures_total").labels(kind, trigger, outcome, *whose(owner)).inc()

    def count_interrupted(self, kind: str, trigger: str, owner: str) -> None:
        """Count a capture that ended with the process before this one."""
        AgentMetrics.count_capture(self, kind, trigger, "failed", owner)

    def read(self, name: str, values: Callable[[], Mapping[Any, float]]) -> None:
        """Add a metric that another part keeps: ``values`` is called at each scrape.

        Its keys are the values of the label, or tuples of them for several labels.
        """
        self.registry.register(_ReadWhenScraped(name, values))

    def _metric(self, kind: type[_Kind], name: str) -> _Kind:
        with self._lock:
            metric = self._made.get(name)
            if metric is None:
                row = CATALOGUE[name]
                metric = self._made[name] = kind(
                    row.full_name, row.help, row.labels, unit=row.unit, registry=self.registry
                )
        assert isinstance(metric, kind), f"{name} is a {metric}"
        return metric


class _ReadWhenScraped(Collector):
    def __init__(self, name: str, values: Callable[[], Mapping[Any, float]]) -> None:
        self._row = CATALOGUE[name]
        self._values = values

    def describe(self) -> Iterable[MetricFamily]:
        return [family_of(self._row)]

    def collect(self) -> Iterable[MetricFamily]:
        family = family_of(self._row)
        # Copied in one step, since their keeper may change them meanwhile.
        for key, value in dict(self._values()).items():
            texts = (key,) if isinstance(key, str) else key
            labels = dict(zip(self._row.labels, texts, strict=True))
            family.samples.append(Sample(self._row.full_name, labels, value))
        return [family]


def family_of(row: Metric) -> MetricFamily:
    """Return the family of a metric without samples, with the unit that its name ends in."""
    name = row.full_name.removesuffix("_total") if row.kind == "counter" else row.full_name
    unit = row.unit if name.endswith(f"_{row.unit}") else ""
    return MetricFamily(name, row.help, row.kind, unit)
