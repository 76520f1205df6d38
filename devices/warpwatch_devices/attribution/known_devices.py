"""Which of the devices that were sampled an id of the kubelet means."""

from __future__ import annotations

from collections.abc import Iterable

from warpwatch_devices.attribution.device_ids import DeviceReference
from warpwatch_telemetry.samples import Device, DeviceSample


class KnownDevices:
    """The devices of the newest samples, by all that an id may call them.

    ``minor_number``, ``mig_index`` and ``placement_start`` of ``Device.info`` are used where the
    source of the samples gives them. Without a minor number the index stands for it: they differ
    only where device nodes were not made in the order of the PCI bus.
    """

    def __init__(self, samples: Iterable[DeviceSample]) -> None:
        # Another GPU may have come to the index of one that is lost.
        devices = tuple(sample.device for sample in samples if sample.reason != "lost")
        self._gpus = [device for device in devices if not device.gpu_instance]
        self._instances = [device for device in devices if device.gpu_instance]

    def resolve(self, reference: DeviceReference) -> str | None:
        """The UUID of the device, None where it is unknown or may be one of several."""
        if reference.uuid and not reference.gpu_instance:
            return reference.uuid
        indices = self._indices(reference)
        if _is_instance(reference):
            found = [
                device.uuid
                for device in self._instances
                if device.index in indices and _matches(device, reference)
            ]
        else:
            found = [device.uuid for device in self._gpus if device.index in indices]
        return found[0] if len(found) == 1 else None

    def _indices(self, reference: DeviceReference) -> set[int]:
        """Indices of the GPU that is meant; an instance carries that of the GPU around it."""
        if reference.index is not None:
            return {reference.index}
        if reference.uuid:
            return {gpu.index for gpu in self._gpus if gpu.uuid == reference.uuid}
        devices = self._gpus or self._instances
        return {device.index for device in devices if _minor(device) == reference.minor}


def _is_instance(reference: DeviceReference) -> bool:
    return bool(reference.gpu_instance or reference.profile or reference.mig_index is not None)


def _matches(device: Device, reference: DeviceReference) -> bool:
    if reference.gpu_instance:
        return device.gpu_instance == reference.gpu_instance
    if reference.mig_index is not None:
        return device.info.get("mig_index") == str(reference.mig_index)
    start = device.info.get("placement_start")
    placed = start is None or start == str(reference.placement)
    return placed and _plain(device.profile) == _plain(reference.profile)


def _plain(profile: str) -> str:
    """``1g.10gb+me`` as the DRA driver writes it in names: only letters and digits count."""
    return "".join(char for char in profile.lower() if char.isalnum())


def _minor(device: Device) -> int:
    minor = device.info.get("minor_number", "")
    return int(minor) if minor.isdecimal() else device.index
