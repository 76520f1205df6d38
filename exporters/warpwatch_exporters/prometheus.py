"""Renders the state in Prometheus' text format and in OpenMetrics, with DCGM's names on request.

A line is a prefix (a series' name and labels) and a value. Prefixes are cached, so a scrape only
joins them with new values.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate

from warpwatch_exporters.series import (
    HistogramSeries,
    Identity,
    SeriesGroup,
    exported_ranks,
    histograms_of,
    labels_of,
    series_of,
    workloads_of,
)
from warpwatch_telemetry.catalogue import (
    CATALOGUE,
    DCGM_NAMES,
    XID_ERRORS,
    DcgmName,
    Profile,
    names_of,
)
from warpwatch_telemetry.metric import SeriesKey
from warpwatch_telemetry.samples import Device, DeviceSample, Workload
from warpwatch_telemetry.state import RankState, State
from warpwatch_telemetry.xids import explain

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
    device has; ``full`` also has fine buckets of step durations.
    """

    inline_workloads: bool = False
    dcgm_names: bool = False
    profile: Profile = "full"


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
    headers = _HEADERS[openmetrics]
    page = [headers[name] + "\n".join(family) for name, family in lines.items() if family]
    if options.dcgm_names:
        page.extend(_dcgm_families(state, openmetrics))
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
    pairs = ",".join(f'{label}="{_escape(value)}"' for label, value in labels.items())
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


def _escape(text: str) -> str:
    """Return a label's value as it stands between its quotes."""
    return encodable(text).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def encodable(text: str) -> str:
    """Replace lone surrogates, as of a file name that is not UTF-8, which would fail the scrape."""
    return text.encode("utf-8", "replace").decode()


def _header(name: str, kind: str, help: str, unit: str = "", *, openmetrics: bool) -> str:
    """Return HELP and TYPE of the family that holds the series ``name``."""
    text = help.replace("\\", "\\\\").replace("\n", "\\n")
    if not openmetrics:
        return f"# HELP {name} {text}\n# TYPE {name} {kind}\n"
    # OpenMetrics names a counter's family without ``_total``, and its unit.
    family = name.removesuffix("_total") if kind == "counter" else name
    named = f"# UNIT {family} {unit}\n" if unit and family.endswith(f"_{unit}") else ""
    quoted = text.replace('"', '\\"')
    return f"# TYPE {family} {kind}\n{named}# HELP {family} {quoted}\n"


# By whether they are OpenMetrics' and by name.
_HEADERS = {
    openmetrics: {
        row.name: _header(row.full_name, row.kind, row.help, row.unit, openmetrics=openmetrics)
        for row in CATALOGUE.values()
    }
    for openmetrics in (False, True)
}


_LAST_XID = "device_xid_last_timestamp_seconds"
_XID_COUNT = "device_xid_errors_total"


def _dcgm_families(state: State, openmetrics: bool) -> Iterator[str]:
    """Yield header and lines of dcgm-exporter's default list: its names, labels and units.

    Dashboards and alerts written for dcgm-exporter work on them unchanged; docs/dcgm.md says where
    they differ on purpose.
    """
    described = list(_described(state))
    for row in DCGM_NAMES.values():
        if not row.default:
            continue
        lines = [
            f"{row.name}{{{labels}{_xid_labels(row, sample)}}} {value}"
            for sample, labels in described
            if (value := _dcgm_value(row, sample)) is not None
        ]
        if lines:
            # OpenMetrics wants ``_total`` at the end of a counter, which these names have not.
            kind = "unknown" if openmetrics and row.kind == "counter" else row.kind
            yield _header(row.name, kind, row.help, openmetrics=openmetrics) + "\n".join(lines)


def _described(state: State) -> Iterator[tuple[DeviceSample, str]]:
    """Return the readable devices with labels; a GPU instance appears once."""
    gpus = {s.device.uuid: s.device for s in state.devices}
    seen: set[tuple[str, str]] = set()
    for sample in state.devices:
        device = sample.device
        place = (device.info.get("parent_uuid", device.uuid), device.gpu_instance)
        if sample.up and place not in seen:
            seen.add(place)
            parent = gpus.get(device.info.get("parent_uuid", ""), device)
            yield sample, ",".join(_dcgm_labels(device, parent, state))


def _dcgm_labels(device: Device, parent: Device, state: State) -> Iterator[str]:
    yield f'gpu="{device.index}"'
    yield f'UUID="{_escape(parent.uuid)}"'
    yield f'pci_bus_id="{_escape(parent.info.get("pci_bus_id", ""))}"'
    yield f'device="nvidia{device.index}"'
    yield f'modelName="{_escape(parent.name)}"'
    if device.gpu_instance:
        yield f'GPU_I_PROFILE="{_escape(device.profile)}"'
        yield f'GPU_I_ID="{_escape(device.gpu_instance)}"'
    yield f'Hostname="{_escape(state.hostname)}"'
    if version := parent.info.get("driver_version"):
        yield f'DCGM_FI_DRIVER_VERSION="{_escape(version)}"'
    for workload in workloads_of(device.uuid, state.attributions)[:1]:
        yield f'container="{_escape(workload.container)}"'
        yield f'namespace="{_escape(workload.namespace)}"'
        yield f'pod="{_escape(workload.pod)}"'


def _dcgm_value(row: DcgmName, sample: DeviceSample) -> str | None:
    """Return the value in DCGM's unit; whole numbers as such, others with six decimals."""
    if row is XID_ERRORS:
        return None if sample.device.gpu_instance else _xid(sample.values)
    values = [sample.values[key] for key in row.series if key in sample.values]
    if len(values) < len(row.series):
        return None
    value = sum(values) * row.factor
    return f"{value:.6f}" if row.decimals else str(round(value))


def _xid(values: Mapping[SeriesKey, float]) -> str | None:
    """Return the newest XID, 0 for none, None if no source watches them."""
    times = {own[0]: value for (name, own), value in values.items() if name == _LAST_XID}
    if times:
        return max(times, key=lambda xid: times[xid])
    return "0" if any(name == _XID_COUNT for name, _ in values) else None


def _xid_labels(row: DcgmName, sample: DeviceSample) -> str:
    if row is not XID_ERRORS:
        return ""
    xid = _xid(sample.values) or "0"
    text = explain(int(xid)).name if xid != "0" else "No Error"
    return f',err_code="{xid}",err_msg="{_escape(text)}"'
