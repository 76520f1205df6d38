"""The state in Prometheus' text format and in OpenMetrics.

A scrape costs little because a series' name and labels are put together once: they are cached by
identity, and a scrape only joins cached prefixes with values.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from itertools import accumulate

from warpwatch.exporters.series import Identity, Values, exported_ranks, series_of
from warpwatch.telemetry.catalogue import CATALOGUE
from warpwatch.telemetry.metric import IDENTITY_LABELS, Metric, SeriesKey
from warpwatch.telemetry.state import STEP_DURATION_BOUNDS_S, RankState, State

logger = logging.getLogger(__name__)

TEXT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"

# Cached prefixes are forgotten all together when there are more identities than this.
MAX_IDENTITIES = 5000
# Of one identity, e.g. of processes that come and go.
MAX_PREFIXES = 2000

_STEP_DURATION = CATALOGUE["step_duration_seconds"]
_Prefixes = dict[SeriesKey, str]
_Lines = dict[str, list[str]]

_prefixes: dict[Identity, _Prefixes] = {}
_buckets: dict[Identity, list[str]] = {}


def render(state: State, *, openmetrics: bool = False) -> bytes:
    """The exposition of ``state``: HELP and TYPE once a family, only what the catalogue knows."""
    lines: _Lines = {name: [] for name in CATALOGUE}
    if len(_prefixes) > MAX_IDENTITIES:
        _prefixes.clear()
        _buckets.clear()
    for identity, values in series_of(state):
        _add(lines, identity, values)
    for rank in exported_ranks(state):
        lines[_STEP_DURATION.name].extend(_histogram(rank))
    headers = _OPENMETRICS_HEADERS if openmetrics else _TEXT_HEADERS
    page = [headers[name] + "\n".join(family) for name, family in lines.items() if family]
    if openmetrics:
        page.append("# EOF")
    return ("\n".join(page) + "\n").encode()


def _add(lines: _Lines, identity: Identity, values: Values) -> None:
    prefixes = _prefixes.get(identity)
    if prefixes is None or len(prefixes) > MAX_PREFIXES:
        prefixes = _prefixes[identity] = {}
    for key, value in values.items():
        prefix = prefixes.get(key)
        if prefix is None:
            prefix = prefixes[key] = _series_prefix(identity, key)
        # Neither NaN nor infinity is a value that was read.
        if prefix and value - value == 0:
            lines[key[0]].append(f"{prefix}{value!r}")


def _series_prefix(identity: Identity, key: SeriesKey) -> str:
    """Name and labels with the blank before the value; empty for what is not in the catalogue."""
    name, own = key
    row = CATALOGUE.get(name)
    if row is None or len(own) != len(row.labels) or len(identity) != _identity_size(row):
        logger.warning("not exported, since the catalogue has no such series: %s %s", name, own)
        return ""
    return f"{row.full_name}{_labels(row, identity, own)} "


def _identity_size(row: Metric) -> int:
    return len(IDENTITY_LABELS[row.scope])


def _labels(row: Metric, identity: Identity, own: tuple[str, ...], *more: str) -> str:
    """An identity label without a value says nothing (a GPU without MIG) and is left out."""
    pairs = [
        f'{label}="{_escape(value)}"'
        for label, value in zip(IDENTITY_LABELS[row.scope], identity, strict=True)
        if value
    ]
    pairs += [f'{label}="{_escape(value)}"' for label, value in zip(row.labels, own, strict=True)]
    pairs += more
    return f"{{{','.join(pairs)}}}" if pairs else ""


def _escape(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    # A lone surrogate, from a file name that is not UTF-8, would fail the whole scrape.
    return escaped.encode("utf-8", "replace").decode()


def _histogram(rank: RankState) -> Iterator[str]:
    identity = (rank.job, rank.name)
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


def _text_header(row: Metric) -> str:
    text = row.help.replace("\\", "\\\\").replace("\n", "\\n")
    return f"# HELP {row.full_name} {text}\n# TYPE {row.full_name} {row.kind}\n"


def _openmetrics_header(row: Metric) -> str:
    """OpenMetrics names a counter's family without ``_total``, and its unit."""
    family = row.full_name.removesuffix("_total") if row.kind == "counter" else row.full_name
    text = row.help.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
    unit = f"# UNIT {family} {row.unit}\n" if row.unit and family.endswith(f"_{row.unit}") else ""
    return f"# TYPE {family} {row.kind}\n{unit}# HELP {family} {text}\n"


_TEXT_HEADERS = {row.name: _text_header(row) for row in CATALOGUE.values()}
_OPENMETRICS_HEADERS = {row.name: _openmetrics_header(row) for row in CATALOGUE.values()}
