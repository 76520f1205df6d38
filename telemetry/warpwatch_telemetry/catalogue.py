"""The metric catalogue: the single source of truth of what is exported, and of label values.

``python -m warpwatch_telemetry.catalogue`` prints docs/metrics.md.
"""

from __future__ import annotations

import csv
import functools
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from warpwatch_telemetry.metric import IDENTITY_LABELS, Kind, Metric, SeriesKey

_TITLES = {"device": "Devices", "rank": "Ranks and jobs", "job": "Ranks and jobs", "host": "Host",
           "agent": "The daemon"}  # fmt: skip
_UNITS = frozenset(("bytes", "celsius", "hertz", "joules", "ratio", "seconds", "watts"))


def _rows(file_name: str) -> list[dict[str, str]]:
    with Path(__file__).with_name(file_name).open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def _metric(row: Mapping[str, str]) -> Metric:
    """Return a row of metrics.csv, which has the kind only where the name does not give it."""
    name, own = row["name"], tuple(row["labels"].split())
    kind: Any = row["kind"] or ("counter" if name.endswith("_total") else "gauge")
    return Metric(name, kind, row["help"], row["scope"], own, _unit_of(name), row["origin"])


def _unit_of(name: str) -> str:
    """Return the metric's unit; empty for a count."""
    unit = name.removesuffix("_total").rpartition("_")[2]
    return unit if unit in _UNITS else ""


# By name without the prefix, in the order of the exposition.
CATALOGUE: Mapping[str, Metric] = MappingProxyType(
    {row["name"]: _metric(row) for row in _rows("metrics.csv")}
)


@dataclass(frozen=True, slots=True)
class DcgmName:
    """One metric of dcgm-exporter, a row of dcgm_names.csv.

    series: our series of the same meaning, all in one unit; several are added up.
    factor: from our unit to theirs.
    decimals: whether DCGM holds it as a floating-point number.
    default: whether dcgm-exporter 4.5 exports it without a configuration. Others are often switched
        on, or a GPU without GPM has them only from DCGM. The *_VIOLATION times are left out: their
        unit differs between releases.
    """

    name: str
    kind: Kind
    help: str
    series: tuple[SeriesKey, ...]
    factor: float = 1.0
    decimals: bool = False
    default: bool = True


# From our unit to that of a device field: MiB, MHz, mJ and per cent. Profiling fields are ratios.
# NVLINK_BANDWIDTH_TOTAL is a rate, although dcgm-exporter declares a counter.
_FACTORS = {"bytes": 1 / 2**20, "hertz": 1e-6, "joules": 1000.0, "ratio": 100.0}
# DCGM divides KiB by 1000 and calls it MB.
_PER_DCGM_MB = 1 / 1024 / 1000


def _dcgm_name(row: Mapping[str, Any]) -> DcgmName:
    """Return a row; the series are separated by ``+``, a series and its labels by a space."""
    keys = [text.split() for text in row["series"].split("+") if text]
    series = tuple((f"device_{name}", tuple(own)) for name, *own in keys)
    unit = _unit_of(keys[0][0]) if keys else ""
    if row["name"].startswith("DCGM_FI_PROF_"):
        factor, decimals = 1.0, unit == "ratio"
    else:
        is_rate = bool(keys) and keys[0][0].endswith("_bytes_per_second")
        factor = _PER_DCGM_MB if is_rate else _FACTORS.get(unit, 1.0)
        decimals = unit == "watts"
    is_default = row["default"] == "yes"
    return DcgmName(row["name"], row["kind"], row["help"], series, factor, decimals, is_default)


# By DCGM's name, in the order of dcgm-exporter's list.
DCGM_NAMES: Mapping[str, DcgmName] = MappingProxyType(
    {row["name"]: _dcgm_name(row) for row in _rows("dcgm_names.csv")}
)
XID_ERRORS = DCGM_NAMES["DCGM_FI_DEV_XID_ERRORS"]


_DEVICE = "device_"
_SERIES = re.compile(r"(?P<name>\w+)(?:\{(?P<labels>.*)\})?", re.DOTALL)
_LABEL = re.compile(r"(?P<label>\w+)=(?P<value>(?:\\.|[^\\,}])*)(?:,|$)", re.DOTALL)


def series_text(key: SeriesKey) -> str:
    """Return a series as text."""
    name, values = key
    row = CATALOGUE.get(name)
    labels = row.labels if row else tuple(f"label{i}" for i in range(len(values)))
    text = name.removeprefix(_DEVICE)
    if not values:
        return text
    pairs = zip(labels, values, strict=False)
    own = ",".join(f"{label}=" + re.sub(r"([\\,}])", r"\\\1", value) for label, value in pairs)
    return f"{text}{{{own}}}"


# A log repeats the same few hundred; process ids come and go.
@functools.lru_cache(maxsize=4096)
def series_key(text: str) -> SeriesKey:
    """Return the key of a text of series_text. Raises ValueError for another text."""
    match = _SERIES.fullmatch(text)
    if match is None:
        raise ValueError(f"metrics: {text!r} is not a metric")
    name = match["name"] if match["name"] in CATALOGUE else _DEVICE + match["name"]
    given = _labels(text, match["labels"] or "")
    row = CATALOGUE.get(name)
    labels = row.labels if row else tuple(given)
    return name, tuple(given.get(label, "") for label in labels)


def _labels(text: str, inside: str) -> dict[str, str]:
    labels: dict[str, str] = {}
    position = 0
    while position < len(inside):
        match = _LABEL.match(inside, position)
        if match is None:
            raise ValueError(f"metrics: {text!r} has bad labels")
        labels[match["label"]] = re.sub(r"\\(.)", r"\1", match["value"], flags=re.DOTALL)
        position = match.end()
    return labels


Profile = Literal["minimal", "default", "full"]

# Identity, use, and faults.
_MINIMAL = """
    up info workload_info slurm_job_info sample_timestamp_seconds utilization_ratio
    memory_utilization_ratio busy_seconds_total sm_active_ratio tensor_active_ratio
    memory_used_bytes memory_total_bytes power_watts energy_joules_total temperature_celsius
    throttle_seconds_total pcie_replay_total nvlink_links nvlink_links_up
    nvlink_receive_bytes_total nvlink_transmit_bytes_total ecc_errors_total remapped_rows
    row_remap_pending row_remap_failure xid_errors_total
"""
# Settings, parts of exported sums, and rates of exported counters.
_FULL_ONLY = """
    nvlink_link_up nvlink_receive_bytes_per_second nvlink_transmit_bytes_per_second
    pcie_receive_bytes_per_second pcie_transmit_bytes_per_second pcie_errors_total
    ecc_location_errors_total row_remap_banks
    violation_seconds_total temperature_margin_threshold_celsius power_instant_watts
    power_limit_default_watts power_limit_min_watts power_limit_max_watts
    bar1_memory_used_bytes bar1_memory_free_bytes bar1_memory_total_bytes
    encoder_utilization_ratio decoder_utilization_ratio jpeg_utilization_ratio
    ofa_utilization_ratio compute_mode persistence_mode vgpu_licensed
"""
MINIMAL = frozenset(f"device_{name}" for name in _MINIMAL.split())
FULL_ONLY = frozenset(f"device_{name}" for name in _FULL_ONLY.split())


@functools.cache
def names_of(profile: Profile) -> tuple[str, ...]:
    """Return the metrics of a profile in the catalogue's order; only devices have fewer."""
    names = [name for name in CATALOGUE if profile == "full" or name not in FULL_ONLY]
    if profile == "minimal":
        names = [name for name in names if name in MINIMAL or CATALOGUE[name].scope != "device"]
    return tuple(names)


# The values of labels, in the order of their sources.

# Why clocks are below their maximum: the bits of nvmlDeviceGetCurrentClocksEventReasons.
THROTTLE_REASONS = (
    "idle", "application_clocks", "sw_power_cap", "hw_slowdown", "sync_boost", "sw_thermal",
    "hw_thermal", "hw_power_brake", "display_clocks",
)  # fmt: skip
# The reasons whose time the driver counts itself.
TIMED_THROTTLE_REASONS = (
    "sw_power_cap", "sync_boost", "sw_thermal", "hw_thermal", "hw_power_brake",
)  # fmt: skip
# NVML_FI_DEV_PERF_POLICY_*, in the order of the field numbers from 74 on.
VIOLATION_POLICIES = (
    "power", "thermal", "sync_boost", "board_limit", "low_utilization", "reliability",
    "application_clocks", "base_clocks",
)  # fmt: skip
CLOCK_DOMAINS = ("graphics", "sm", "memory", "video")
PCIE_ERRORS = (
    "correctable", "naks_received", "receiver", "bad_tlp", "naks_sent", "bad_dllp", "non_fatal",
    "fatal", "unsupported_request", "lcrc", "lane",
)  # fmt: skip
NVLINK_ERRORS = ("crc_flit", "crc_data", "replay", "recovery")
ECC_LOCATIONS = ("l1_cache", "l2_cache", "dram", "register_file", "texture")
# nvmlRowRemapperHistogramValues_t: banks by how many spare rows they have left.
REMAP_AVAILABILITIES = ("max", "high", "partial", "low", "none")
CPU_MODES = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal")
PRESSURE_RESOURCES = ("cpu", "memory", "io")
# Errors a second, by counter file, above which a port is in trouble; 0: a single one is. The worst
# come first. Limits are those of NVSentinel's link counters, and for others those of their kind.
ERRORS: dict[str, float] = {
    "counters/link_downed": 0.0,
    "counters/excessive_buffer_overrun_errors": 0.0,
    "counters/local_link_integrity_errors": 0.0,
    "hw_counters/req_transport_retries_exceeded": 0.0,
    "hw_counters/req_rnr_retries_exceeded": 0.0,
    "counters/link_error_recovery": 5 / 60,
    "hw_counters/local_ack_timeout_err": 1.0,
    "hw_counters/retrans_timeout_events": 1.0,
    "counters/symbol_error": 10.0,
    "counters/port_rcv_errors": 10.0,
    "hw_counters/rx_drops": 10.0,
    "hw_counters/rnr_nak_retry_err": 10.0,
    "hw_counters/roce_adp_retrans": 10.0,
    "hw_counters/roce_slow_restart": 10.0,
    "counters/port_xmit_discards": 100.0,
    "hw_counters/out_of_sequence": 100.0,
    "hw_counters/packet_seq_err": 100.0,
    "hw_counters/implied_nak_seq_err": 100.0,
    "hw_counters/out_of_buffer": 100.0,
    "hw_counters/retrans_pkts": 100.0,
}
# Congestion control at work, which is normal under load.
CONGESTION = (
    "counters/port_xmit_wait", "hw_counters/np_ecn_marked_roce_packets", "hw_counters/np_cnp_sent",
    "hw_counters/rp_cnp_handled",
)  # fmt: skip

_INTRODUCTION = """\
# Metrics

Generated by `python -m warpwatch_telemetry.catalogue`; do not edit.

Base units throughout, ratios from 0 to 1, counters end in `_total`. A value that could not be read
is absent, never 0. `gpu_instance` and `profile` are present on MIG instances only. The last column
names the dcgm-exporter metrics of the same meaning (see dcgm.md).
"""


def markdown() -> str:
    """Return the catalogue as docs/metrics.md."""
    parts = [_INTRODUCTION]
    for title, rows in groupby(CATALOGUE.values(), _title):
        parts.append(f"\n## {title}\n\n")
        parts.extend(_table(rows))
    return "".join(parts)


def _title(row: Metric) -> str:
    return "Network" if row.name.startswith("network_") else _TITLES[row.scope]


def _table(rows: Iterable[Metric]) -> Iterable[str]:
    yield "| name | type | labels | what it says | origin | dcgm-exporter |\n"
    yield "|---|---|---|---|---|---|\n"
    for row in rows:
        own = ", ".join(f"`{label}`" for label in row.labels)
        identity = ", ".join(IDENTITY_LABELS[row.scope])
        labels = "; ".join(part for part in (identity, own) if part)
        alias = ", ".join(f"`{name}`" for name in _aliases(row))
        yield (
            f"| `{row.full_name}` | {row.kind} | {labels} | {row.help} | {row.origin} | {alias} |\n"
        )


def _aliases(row: Metric) -> Iterable[str]:
    return (
        alias.name
        for alias in DCGM_NAMES.values()
        if any(name == row.name for name, _ in alias.series)
    )


if __name__ == "__main__":
    sys.stdout.write(markdown())
