"""The state in Prometheus' text format and in OpenMetrics.

A scrape costs little because a series' name and labels are put together once: they are cached by
identity, and a scrape only joins cached prefixes with values.
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

# Prefixes that are cached beyond those of the newest page, e.g. of processes that have ended.
SPARE_PREFIXES = 500

_Prefixes = dict[SeriesKey, str]
_Lines = dict[str, list[str]]
_Holder = tuple[Identity, Workload | None]

# By what they belong to; what a page did not need is forgotten with it.
_prefixes: dict[_Holder, _Prefixes] = {}
_buckets: dict[tuple[Identity, bool, SeriesKey], list[str]] = {}


@dataclass(frozen=True, slots=True)
class Options:
    """The configuration of the exposition.

    ``inline_workloads``: device series carry namespace, pod and container of their workload.
    ``dcgm_names`` adds the series of dcgm-exporter's default list. ``profile``: how many series a
    device has; ``full`` also has fine buckets of step durations. ``node``: the node's name in
    those; empty for the host's name.
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
        for one in histograms_of(rank, fine):
            lines[one.key[0]].extend(_histogram(identity, one, fine))
    _forget_others(needed, ranks)
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
        # Neither NaN nor infinity is a value that was read.
        if prefix and family is not None and value - value == 0:
            family.append(f"{prefix}{value!r}")


def _forget_others(needed: Mapping[_Holder, int], ranks: Mapping[Identity, RankState]) -> None:
    """Devices, workloads and processes come and go; the caches hold those of the newest page."""
    for holder in _prefixes.keys() - needed.keys():
        del _prefixes[holder]
    for holder, count in needed.items():
        if len(_prefixes[holder]) > count + SPARE_PREFIXES:
            _prefixes[holder] = {}
    for old in [old for old in _buckets if old[0] not in ranks]:
        del _buckets[old]


def _series_prefix(group: SeriesGroup, key: SeriesKey) -> str:
    """Return name and labels with the blank before the value; nothing outside of the catalogue."""
    labels = labels_of(group, key)
    return "" if labels is None else _prefix(CATALOGUE[key[0]].full_name, labels)


def _prefix(name: str, labels: Mapping[str, str]) -> str:
    pairs = ",".join(f'{label}="{escape(value)}"' for label, value in labels.items())
    return f"{name}{{{pairs}}} " if pairs else f"{name} "


def _histogram(identity: Identity, one: HistogramSeries, fine: bool) -> Iterator[str]:
    prefixes = _buckets.get((identity, fine, one.key))
    if prefixes is None:
        prefixes = _histogram_prefixes(identity, one.key, one.buckets)
        _buckets[identity, fine, one.key] = prefixes
    counts = list(accumulate(one.histogram.counts))
    values = (*(counts[index] for index in one.buckets.values()), counts[-1], one.histogram.sum)
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
