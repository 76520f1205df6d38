"""Renders the state in Prometheus' text format and in OpenMetrics.

A line is a prefix (a series' name and labels) and a value. Prefixes are cached, so a scrape only
joins them with new values.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate

from warpwatch_exporters import dcgm_names
from warpwatch_exporters.exposition import escape, header
from warpwatch_exporters.series import (
    HistogramSeries,
    Identity,
    SeriesGroup,
    exported_ranks,
    histograms_of,
    labels_of,
    series_of,
)
from warpwatch_telemetry.catalogue import CATALOGUE, Profile, names_of
from warpwatch_telemetry.metric import SeriesKey
from warpwatch_telemetry.samples import Workload
from warpwatch_telemetry.state import RankState, State

# A holder may keep this many prefixes that the newest page did not need.
SPARE_PREFIXES = 500

_Prefixes = dict[SeriesKey, str]
_Lines = dict[str, list[str]]
_Holder = tuple[Identity, Workload | None]

# The caches. A device, workload or process that is no longer on the page loses its entries.
_prefixes: dict[_Holder, _Prefixes] = {}
_buckets: dict[tuple[Identity, bool, SeriesKey], list[str]] = {}


@dataclass(frozen=True, slots=True)
class Options:
    """The configuration of the exposition.

    ``inline_workloads``: device series carry namespace, pod and container of their workload.
    ``dcgm_names`` adds the series of dcgm-exporter's default list. ``profile``: how many series a
    device has; ``full`` also has fine buckets of step durations. ``node``: the node's name in
    series of dcgm-exporter; empty for the host's name.
    """

    inline_workloads: bool = False
    dcgm_names: bool = False
    profile: Profile = "full"
    node: str = ""


def render(state: State, options: Options = Options(), *, openmetrics: bool = False) -> bytes:
    """Return the exposition of ``state``, with HELP and TYPE once per family of the catalogue."""
    lines: _Lines = {name: [] for name in names_of(options.profile)}
    needed: Counter[_Holder] = Counter()
    for group in series_of(state, inline_workloads=options.inline_workloads):
        needed[group.identity, group.workload] += len(group.values)
        _add(lines, group)
    ranks: dict[Identity, RankState] = {rank.key: rank for rank in exported_ranks(state)}
    fine = options.profile == "full"
    for identity, rank in ranks.items():
        for histogram in histograms_of(rank, fine):
            lines[histogram.key[0]].extend(_histogram(identity, histogram, fine))
    _trim_caches(needed, ranks)
    headers = _OPENMETRICS_HEADERS if openmetrics else _TEXT_HEADERS
    page = [headers[name] + "\n".join(family) for name, family in lines.items() if family]
    if options.dcgm_names:
        page.extend(dcgm_names.families(state, options.node, openmetrics=openmetrics))
    return ("\n".join(page) + "\n").encode()


def _add(lines: _Lines, group: SeriesGroup) -> None:
    prefixes = _prefixes.setdefault((group.identity, group.workload), {})
    for key, value in group.values.items():
        family = lines.get(key[0])
        if family is None and key[0] in CATALOGUE:
            continue
        prefix = prefixes.get(key)
        if prefix is None:
            prefix = prefixes[key] = _series_prefix(group, key)
        # NaN and infinity are not values that a device returned: for them the difference is NaN.
        if prefix and family is not None and value - value == 0:
            family.append(f"{prefix}{value!r}")


def _trim_caches(needed: Mapping[_Holder, int], ranks: Mapping[Identity, RankState]) -> None:
    """Remove what the newest page did not need: devices, workloads and processes come and go."""
    for holder in _prefixes.keys() - needed.keys():
        del _prefixes[holder]
    for holder, count in needed.items():
        if len(_prefixes[holder]) > count + SPARE_PREFIXES:
            _prefixes[holder] = {}
    for old in [old for old in _buckets if old[0] not in ranks]:
        del _buckets[old]


def _series_prefix(group: SeriesGroup, key: SeriesKey) -> str:
    """Return name, labels and the blank before the value; empty if the catalogue lacks the key."""
    labels = labels_of(group, key)
    return "" if labels is None else _prefix(CATALOGUE[key[0]].full_name, labels)


def _prefix(name: str, labels: Mapping[str, str]) -> str:
    pairs = ",".join(f'{label}="{escape(value)}"' for label, value in labels.items())
    return f"{name}{{{pairs}}} " if pairs else f"{name} "


def _histogram(identity: Identity, series: HistogramSeries, fine: bool) -> Iterator[str]:
    prefixes = _buckets.get((identity, fine, series.key))
    if prefixes is None:
        prefixes = _histogram_prefixes(identity, series.key, series.buckets)
        _buckets[identity, fine, series.key] = prefixes
    counts, total = list(accumulate(series.histogram.counts)), series.histogram.sum
    values = (*(counts[index] for index in series.buckets.values()), counts[-1], total)
    return (f"{prefix}{value!r}" for prefix, value in zip(prefixes, values, strict=True))


def _histogram_prefixes(identity: Identity, key: SeriesKey, bounds: Iterable[str]) -> list[str]:
    name = CATALOGUE[key[0]].full_name
    labels = labels_of(SeriesGroup(identity, {}), key) or {}
    buckets = [_prefix(f"{name}_bucket", {**labels, "le": bound}) for bound in bounds]
    return [*buckets, _prefix(f"{name}_count", labels), _prefix(f"{name}_sum", labels)]


_TEXT_HEADERS = {
    row.name: header(row.full_name, row.kind, row.help, row.unit, openmetrics=False)
    for row in CATALOGUE.values()
}
_OPENMETRICS_HEADERS = {
    row.name: header(row.full_name, row.kind, row.help, row.unit, openmetrics=True)
    for row in CATALOGUE.values()
}
