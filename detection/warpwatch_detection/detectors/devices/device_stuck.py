"""A call for this device that the driver does not come back from."""

from __future__ import annotations

from dataclasses import dataclass

from warpwatch_detection.detectors.devices.hysteresis import Symptom
from warpwatch_detection.detectors.devices.watch import DeviceWatch, Watched
from warpwatch_telemetry.records import DeviceReading

# As the watchdog of the source publishes it, which has waited long enough: found at once.
STUCK = "stuck"


@dataclass(slots=True)
class StuckDevice(Watched):
    """well: when a call came back last."""

    well: float | None = None


class DeviceStuck(DeviceWatch[StuckDevice]):
    kind = "device_stuck"
    device_type = StuckDevice
    clear_s = 5.0
    usual_severity = "critical"

    def examine(self, device: StuckDevice, seen: DeviceReading) -> Symptom:
        """Whatever else is said of a device, its call has come back."""
        if seen.up or seen.reason != STUCK:
            device.well = seen.time
            return Symptom(0.0, 0.0)
        return Symptom(1.0, None if device.well is None else seen.time - device.well)

    def describe(self, device: StuckDevice) -> str:
        stuck_s = device.hysteresis.value
        if stuck_s == 0.0:
            return "the driver's calls for the GPU come back"
        lasting = "" if stuck_s is None else f" for {stuck_s:.0f} s"
        return f"a driver call for the GPU has not returned{lasting}"
