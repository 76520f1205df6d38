"""From DCGM's numbers to ours: the name table read backwards, and what cannot be a value.

DCGM marks values that it does not have by numbers at the end of each type's range
(dcgmvalue.py): blank, not found, not supported, not permitted. dcgm-exporter drops most of them,
not all.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType

from warpwatch_telemetry.catalogue import CATALOGUE
from warpwatch_telemetry.dcgm_names import DCGM_NAMES, DcgmName

# What measures a ratio may overshoot a little; what is beyond is no ratio.
MAX_RATIO = 1.05

_INT32_BLANKS = range(0x7FFFFFF0, 0x80000000)
# As a float: what is between this and 2**63 rounds to 2**63.
_INT64_BLANK = float(0x7FFFFFFFFFFFFFF0)
_FP64_BLANK = 2.0**47

# What one number of DCGM says: a sum of several series of ours cannot be taken apart, and the last
# XID is no count of them.
ROWS: Mapping[str, DcgmName] = MappingProxyType(
    {name: row for name, row in DCGM_NAMES.items() if len(row.series) == 1}
)
PROFILING_ROWS: Mapping[str, DcgmName] = MappingProxyType(
    {name: row for name, row in ROWS.items() if name.startswith("DCGM_FI_PROF_")}
)

# What a GPU instance has for itself. Everything else DCGM repeats for each instance: power,
# temperatures, clocks, links and errors are the GPU's.
INSTANCE_ROWS: Mapping[str, DcgmName] = MappingProxyType(
    {
        name: row
        for name, row in ROWS.items()
        if name.startswith("DCGM_FI_DEV_FB_")
        or (name in PROFILING_ROWS and not name.endswith("_BYTES"))
    }
)


def in_our_unit(row: DcgmName, value: float) -> float | None:
    """The value of ``row``'s series, in its unit; None for what cannot be one."""
    if not math.isfinite(value) or value < 0 or _is_blank(value, row.decimals):
        return None
    ours = round(value / row.factor, 6)
    if CATALOGUE[row.series[0][0]].unit != "ratio":
        return ours
    return min(ours, 1.0) if ours <= MAX_RATIO else None


def _is_blank(value: float, decimals: bool) -> bool:
    if value in _INT32_BLANKS:
        return True
    return value >= (_FP64_BLANK if decimals else _INT64_BLANK)
