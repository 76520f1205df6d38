"""Converts DCGM's values to our units and finds their devices among those of NVML.

DCGM marks missing values by numbers at the end of each type's range (dcgmvalue.py): blank, not
found, not supported, not permitted. dcgm-exporter drops most of them, not all.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType

from warpwatch_devices.source import Sink
from warpwatch_telemetry.catalogue import CATALOGUE, DCGM_NAMES, DcgmName
from warpwatch_telemetry.samples import Device, DeviceSample

# A measured ratio may overshoot a little; a larger value is invalid.
MAX_RATIO = 1.05

_INT32_BLANKS = range(0x7FFFFFF0, 0x80000000)
# As a float: what is between this and 2**63 rounds to 2**63.
_INT64_BLANK = float(0x7FFFFFFFFFFFFFF0)
_FP64_BLANK = 2.0**47

# Fields with a single series of ours: a sum cannot be split, and the last XID is not a count.
ROWS: Mapping[str, DcgmName] = MappingProxyType(
    {name: row for name, row in DCGM_NAMES.items() if len(row.series) == 1}
)
PROFILING_ROWS: Mapping[str, DcgmName] = MappingProxyType(
    {name: row for name, row in ROWS.items() if name.startswith("DCGM_FI_PROF_")}
)

# The values of a GPU instance. DCGM repeats all others for each instance: power, temperatures,
# clocks, links and errors are the GPU's.
INSTANCE_ROWS: Mapping[str, DcgmName] = MappingProxyType(
    {
        name: row
        for name, row in ROWS.items()
        if name.startswith("DCGM_FI_DEV_FB_")
        or (name in PROFILING_ROWS and not name.endswith("_BYTES"))
    }
)


def in_our_unit(row: DcgmName, value: float) -> float | None:
    """Return the value in the unit of ``row``'s series, or None for an invalid one."""
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


_DCGM_SOURCES = frozenset({"dcgm", "dcgm_exporter"})


def device_of(listed: Device, known: Iterable[DeviceSample]) -> Device | None:
    """Return the device that ``listed`` is; its UUID is the GPU's even for a GPU instance.

    DCGM does not give the UUID of a MIG device: NVML's device with the same GPU and GPU instance is
    used, the first of several compute instances. An instance of a GPU that NVML lacks gets the key
    ``<uuid>/gi<id>``; an instance that NVML lacks on a GPU that it has is None.
    """
    devices = [sample.device for sample in known if sample.source not in _DCGM_SOURCES]
    gpu = next((device for device in devices if device.uuid == listed.uuid), None)
    if not listed.gpu_instance:
        return gpu or listed
    if gpu is None:
        return replace(listed, uuid=f"{listed.uuid}/gi{listed.gpu_instance}")
    instances = (d for d in devices if d.info.get("parent_uuid") == gpu.uuid)
    return next((d for d in instances if d.gpu_instance == listed.gpu_instance), None)


class PublishedDevices:
    """A source's published devices, to forget those that disappear."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._uuids: frozenset[str] = frozenset()

    def publish(self, samples: Iterable[DeviceSample], sink: Sink) -> None:
        """Publish all devices of the source, and forget the others."""
        uuids = set()
        for sample in samples:
            uuids.add(sample.device.uuid)
            sink.publish_device(sample)
        for uuid in self._uuids - uuids:
            sink.forget_device(uuid, self._source)
        self._uuids = frozenset(uuids)
