"""Detectors of devices: readings in, verdicts out; the register adds job and rank.

- watch: what they have in common; hysteresis: how a symptom lasts, how a counter grows
- series: which values they look up
- the kinds: one file each, heat and power in throttle
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from warpwatch_detection.config import AnomaliesConfig, DetectionConfig
from warpwatch_detection.detector import Detector
from warpwatch_detection.detectors.devices.clock_drop import ClockDrop
from warpwatch_detection.detectors.devices.device_idle import DeviceIdle
from warpwatch_detection.detectors.devices.device_lost import DeviceLost
from warpwatch_detection.detectors.devices.device_needs_service import DeviceNeedsService
from warpwatch_detection.detectors.devices.device_stuck import DeviceStuck
from warpwatch_detection.detectors.devices.ecc_uncorrectable import EccUncorrectable
from warpwatch_detection.detectors.devices.network import NetworkErrors, NetworkLinkDown
from warpwatch_detection.detectors.devices.nvlink_error import NvlinkError
from warpwatch_detection.detectors.devices.overheating import Overheating
from warpwatch_detection.detectors.devices.pcie_degraded import PcieDegraded
from warpwatch_detection.detectors.devices.row_remap import RowRemap
from warpwatch_detection.detectors.devices.throttle import PowerBrake, ThermalThrottle
from warpwatch_detection.detectors.devices.xid import XidErrors

# In the order in which they judge a reading: a cause comes before what it explains.
DEVICE_DETECTORS: Mapping[str, Callable[[DetectionConfig, AnomaliesConfig], Detector]] = {
    "device_needs_service": lambda *_: DeviceNeedsService(),
    "device_lost": lambda *_: DeviceLost(),
    "device_stuck": lambda *_: DeviceStuck(),
    "xid": lambda kinds, anomalies: XidErrors(kinds.xid, anomalies.hold_s),
    "ecc_uncorrectable": lambda _, anomalies: EccUncorrectable(anomalies.hold_s),
    "row_remap": lambda _, anomalies: RowRemap(anomalies.hold_s),
    "thermal_throttle": lambda *_: ThermalThrottle(),
    "power_brake": lambda *_: PowerBrake(),
    "clock_drop": lambda *_: ClockDrop(),
    "pcie_degraded": lambda *_: PcieDegraded(),
    "nvlink_error": lambda *_: NvlinkError(),
    "network_link_down": lambda *_: NetworkLinkDown(),
    "network_errors": lambda *_: NetworkErrors(),
    "device_idle": lambda kinds, _: DeviceIdle(kinds.device_idle),
    "overheating": lambda *_: Overheating(),
}
