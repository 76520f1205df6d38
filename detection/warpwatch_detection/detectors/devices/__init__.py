"""Detectors of devices: readings in, results out; the register adds job and rank.

- watch: their base: how a symptom lasts, how a counter grows
- device_lost (also device_stuck), device_needs_service, xid, memory_errors (ecc_uncorrectable,
  row_remap), throttle (thermal_throttle, power_brake, overheating), clock_drop, links
  (pcie_degraded, nvlink_error, network_link_down, network_errors), device_idle
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from warpwatch_detection.config import AnomaliesConfig, DetectionConfig
from warpwatch_detection.detector import Detector
from warpwatch_detection.detectors.devices.clock_drop import ClockDrop
from warpwatch_detection.detectors.devices.device_idle import DeviceIdle
from warpwatch_detection.detectors.devices.device_lost import DeviceLost, DeviceStuck
from warpwatch_detection.detectors.devices.device_needs_service import DeviceNeedsService
from warpwatch_detection.detectors.devices.links import (
    NetworkErrors,
    NetworkLinkDown,
    NvlinkError,
    PcieDegraded,
)
from warpwatch_detection.detectors.devices.memory_errors import EccUncorrectable, RowRemap
from warpwatch_detection.detectors.devices.throttle import Overheating, PowerBrake, ThermalThrottle
from warpwatch_detection.detectors.devices.xid import XidErrors
from warpwatch_detection.ranks import RankDevices

# ``RankDevices`` is kept up to date by the engine.
MakeDetector = Callable[[DetectionConfig, AnomaliesConfig, RankDevices], Detector]
# In the order in which they evaluate a reading: a cause comes before what it explains.
DEVICE_DETECTORS: Mapping[str, MakeDetector] = {
    "device_needs_service": lambda *_: DeviceNeedsService(),
    "device_lost": lambda *_: DeviceLost(),
    "device_stuck": lambda *_: DeviceStuck(),
    "xid": lambda kinds, anomalies, _: XidErrors(kinds.xid, anomalies.hold_s),
    "ecc_uncorrectable": lambda _, anomalies, __: EccUncorrectable(anomalies.hold_s),
    "row_remap": lambda _, anomalies, __: RowRemap(anomalies.hold_s),
    "thermal_throttle": lambda *_: ThermalThrottle(),
    "power_brake": lambda *_: PowerBrake(),
    "clock_drop": lambda *_: ClockDrop(),
    "pcie_degraded": lambda *_: PcieDegraded(),
    "nvlink_error": lambda *_: NvlinkError(),
    "network_link_down": lambda *_: NetworkLinkDown(),
    "network_errors": lambda *_: NetworkErrors(),
    "device_idle": lambda kinds, _, ranks: DeviceIdle(kinds.device_idle, ranks),
    "overheating": lambda *_: Overheating(),
}
