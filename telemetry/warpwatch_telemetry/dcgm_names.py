"""Maps dcgm-exporter's names, types and units to our series.

The names are rows of dcgm_names.csv, in the order of dcgm-exporter's list. Without a configuration
dcgm-exporter 4.5 exports those with ``default``; others are often switched on, or a GPU without GPM
has them only from DCGM. The *_VIOLATION times are left out: their unit differs between releases.
NVLINK_BANDWIDTH_TOTAL is a rate, although dcgm-exporter declares a counter.

DCGM's device fields are in MiB, MHz, mJ and per cent; its profiling fields are ratios.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from warpwatch_telemetry.metric import Kind, SeriesKey, unit_of


@dataclass(frozen=True, slots=True)
class DcgmName:
    """One metric of dcgm-exporter.

    series: our series of the same meaning, all in one unit; several are added up.
    factor: from our unit to theirs.
    decimals: whether DCGM holds it as a floating-point number.
    """

    name: str
    kind: Kind
    help: str
    series: tuple[SeriesKey, ...]
    factor: float = 1.0
    decimals: bool = False
    default: bool = True


# From our unit to that of a device field.
_FACTORS = {"bytes": 1 / 2**20, "hertz": 1e-6, "joules": 1000.0, "ratio": 100.0}
# DCGM divides KiB by 1000 and calls it MB.
_PER_DCGM_MB = 1 / 1024 / 1000


def _read() -> Iterator[DcgmName]:
    with Path(__file__).with_suffix(".csv").open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            yield _name(row)


def _name(row: Mapping[str, Any]) -> DcgmName:
    """Return a row; the series are separated by ``+``, a series and its labels by a space."""
    keys = [text.split() for text in row["series"].split("+") if text]
    series = tuple((f"device_{name}", tuple(own)) for name, *own in keys)
    unit = unit_of(keys[0][0]) if keys else ""
    if row["name"].startswith("DCGM_FI_PROF_"):
        factor, decimals = 1.0, unit == "ratio"
    else:
        is_rate = bool(keys) and keys[0][0].endswith("_bytes_per_second")
        factor = _PER_DCGM_MB if is_rate else _FACTORS.get(unit, 1.0)
        decimals = unit == "watts"
    is_default = row["default"] == "yes"
    return DcgmName(row["name"], row["kind"], row["help"], series, factor, decimals, is_default)


# By DCGM's name.
DCGM_NAMES: Mapping[str, DcgmName] = MappingProxyType({row.name: row for row in _read()})
XID_ERRORS = DCGM_NAMES["DCGM_FI_DEV_XID_ERRORS"]
