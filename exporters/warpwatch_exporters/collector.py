"""The state as a collector of prometheus_client, for a registry in a process of one's own.

It has the same samples as ``prometheus.render``, which writes the daemon's own page because that
takes a tenth of the time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate

from prometheus_client.core import Metric as MetricFamily
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from warpwatch_exporters.prometheus import encodable
from warpwatch_exporters.series import (
    HistogramSeries,
    SeriesGroup,
    exported_ranks,
    histograms_of,
    labels_of,
    series_of,
)
from warpwatch_runtime.agent_metrics import family_of
from warpwatch_telemetry.catalogue import CATALOGUE, Profile, names_of
from warpwatch_telemetry.state import State


class StateCollector(Collector):
    """A collector for ``registry.register``; each scrape calls ``get_state``."""

    def __init__(
        self,
        get_state: Callable[[], State],
        profile: Profile = "full",
        *,
        inline_workloads: bool = False,
    ) -> None:
        self._get_state = get_state
        self._profile = profile
        self._inline_workloads = inline_workloads

    def collect(self) -> Iterator[MetricFamily]:
        """Yield the families that have samples, in the catalogue's order."""
        state = self._get_state()
        families = {name: family_of(CATALOGUE[name]) for name in names_of(self._profile)}
        for group in series_of(state, inline_workloads=self._inline_workloads):
            for key, value in group.values.items():
                labels = labels_of(group, key)
                family = families.get(key[0])
                if labels is not None and family is not None and math.isfinite(value):
                    row = CATALOGUE[key[0]]
                    family.samples.append(_sample(row.full_name, labels, value))
        for rank in exported_ranks(state):
            for one in histograms_of(rank, self._profile == "full"):
                labels = labels_of(SeriesGroup(rank.key, {}), one.key) or {}
                families[one.key[0]].samples.extend(_histogram(one, labels))
        yield from (family for family in families.values() if family.samples)


def _sample(name: str, labels: Mapping[str, str], value: float) -> Sample:
    return Sample(name, {label: encodable(text) for label, text in labels.items()}, value)


def _histogram(one: HistogramSeries, labels: Mapping[str, str]) -> Iterator[Sample]:
    name = CATALOGUE[one.key[0]].full_name
    counts = list(accumulate(one.histogram.counts))
    for bound, index in one.buckets.items():
        yield _sample(f"{name}_bucket", {**labels, "le": bound}, counts[index])
    yield _sample(f"{name}_count", labels, counts[-1])
    yield _sample(f"{name}_sum", labels, one.histogram.sum)
