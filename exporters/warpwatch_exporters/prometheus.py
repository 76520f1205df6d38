"""The state in Prometheus' text format and in OpenMetrics.

A scrape costs little because a series' name and labels are put together once: they are cached by
identity, and a scrape only joins cached prefixes with values.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate

from warpwatch_exporters import dcgm_names
from warpwatch_exporters.exposition import escape, header
from warpwatch_exporters.series import Identity, Part, exported_ranks, series_of
from warpwatch_telemetry.attribution import Workload
from warpwatch_telemetry.catalogue import CATALOGUE
from warpwatch_telemetry.metric import IDENTITY_LABELS, Metric, SeriesKey
from warpwatch_telemetry.state import STEP_DURATION_BOUNDS_S, RankState, State

logger = logging.getLogger(__name__)

TEXT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"

# Prefixes that are cached beyond those of the newest page, e.g. of processes that have ended.
SPARE_PREFIXES = 500

_STEP_DURATION = CATALOGUE["step_duration_seconds"]
_Prefixes = dict[SeriesKey, str]
_Lines = dict[str, list[str]]
_Holder = tuple[Identity, Workload | None]

# By what they belong to; what a page did not need is forgotten with it.
_prefixes: dict[_Holder, _Prefixes] = {}
_buckets: dict[Identity, list[str]] = {}


@dataclass(frozen=True, slots=True)
class Options:
    """What is configured of the exposition.

    inline_workloads: device series carry namespace, pod and container of their workload.
    dcgm_names: the series of dcgm-exporter's default list come out as well.
    node: the node's name in those; empty for the host's name.
    """

    inline_workloads: bool = False
    dcgm_names: bool = False
    node: str = ""


def render(state: State, options: Options = Options(), *, openmetrics: bool = False) -> bytes:
    """The exposition of ``state``: HELP and TYPE once a family, only what the catalogue knows."""
    lines: _Lines = {name: [] for name in CATALOGUE}
    needed: Counter[_Holder] = Counter()
    for part in series_of(state, inline_workloads=options.inline_workloads):
        needed[part.identity, part.workload] += len(part.values)
        _add(lines, part)
    ranks: dict[Identity, RankState] = {
        (rank.job, rank.name): rank for rank in exported_ranks(state)
    }
    for identity, rank in ranks.items():
        lines[_STEP_DURATION.name].extend(_histogram(identity, rank))
    _forget_others(needed, ranks)
    headers = _OPENMETRICS_HEADERS if openmetrics else _TEXT_HEADERS
    page = [headers[name] + "\n".join(family) for name, family in lines.items() if family]
    if options.dcgm_names:
        page.extend(dcgm_names.families(state, options.node, openmetrics=openmetrics))
    if openmetrics:
        page.append("# EOF")
    return ("\n".join(page) + "\n").encode()


def _add(lines: _Lines, part: Part) -> None:
    prefixes = _prefixes.setdefault((part.identity, part.workload), {})
    for key, value in part.values.items():
        prefix = prefixes.get(key)
        if prefix is None:
            prefix = prefixes[key] = _series_prefix(part, key)
        # Neither NaN nor infinity is a value that was read.
        if prefix and value - value == 0:
            lines[key[0]].append(f"{prefix}{value!r}")


def _forget_others(needed: Mapping[_Holder, int], ranks: Mapping[Identity, RankState]) -> None:
    """Devices, workloads and processes come and go; the caches hold those of the newest page."""
    for holder in _prefixes.keys() - needed.keys():
        del _prefixes[holder]
    for holder, count in needed.items():
        if len(_prefixes[holder]) > count + SPARE_PREFIXES:
            _prefixes[holder] = {}
    for identity in _buckets.keys() - ranks.keys():
        del _buckets[identity]


def _series_prefix(part: Part, key: SeriesKey) -> str:
    """Name and labels with the blank before the value; empty for what is not in the catalogue."""
    name, own = key
    identity = part.identity
    row = CATALOGUE.get(name)
    if row is None or len(own) != len(row.labels) or len(identity) != _identity_size(row):
        logger.warning("not exported, since the catalogue has no such series: %s %s", name, own)
        return ""
    workload = _workload_labels(part.workload) if part.workload else ()
    return f"{row.full_name}{_labels(row, identity, own, *workload)} "


def _workload_labels(workload: Workload) -> tuple[str, ...]:
    return (
        f'namespace="{escape(workload.namespace)}"',
        f'pod="{escape(workload.pod)}"',
        f'container="{escape(workload.container)}"',
    )


def _identity_size(row: Metric) -> int:
    return len(IDENTITY_LABELS[row.scope])


def _labels(row: Metric, identity: Identity, own: tuple[str, ...], *more: str) -> str:
    """An identity label without a value says nothing (a GPU without MIG) and is left out."""
    pairs = [
        f'{label}="{escape(value)}"'
        for label, value in zip(IDENTITY_LABELS[row.scope], identity, strict=True)
        if value
    ]
    pairs += [f'{label}="{escape(value)}"' for label, value in zip(row.labels, own, strict=True)]
    pairs += more
    return f"{{{','.join(pairs)}}}" if pairs else ""


def _histogram(identity: Identity, rank: RankState) -> Iterator[str]:
    prefixes = _buckets.get(identity)
    if prefixes is None:
        prefixes = _buckets[identity] = _histogram_prefixes(identity)
    counts = list(accumulate(rank.durations.counts))
    values = (*counts, counts[-1], rank.durations.sum)
    return (f"{prefix}{value!r}" for prefix, value in zip(prefixes, values, strict=True))


def _histogram_prefixes(identity: Identity) -> list[str]:
    row = _STEP_DURATION
    bounds = [repr(float(bound)) for bound in STEP_DURATION_BOUNDS_S] + ["+Inf"]
    buckets = [
        f"{row.full_name}_bucket" + _labels(row, identity, (), f'le="{bound}"') + " "
        for bound in bounds
    ]
    plain = _labels(row, identity, ())
    return [*buckets, f"{row.full_name}_count{plain} ", f"{row.full_name}_sum{plain} "]


_TEXT_HEADERS = {
    row.name: header(row.full_name, row.kind, row.help, row.unit, openmetrics=False)
    for row in CATALOGUE.values()
}
_OPENMETRICS_HEADERS = {
    row.name: header(row.full_name, row.kind, row.help, row.unit, openmetrics=True)
    for row in CATALOGUE.values()
}
