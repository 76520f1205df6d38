"""Which GPU sits at which address of the PCI bus, of those too that no longer answer."""

from __future__ import annotations

from warpwatch_daemon.doctor.facts import Survey
from warpwatch_daemon.doctor.machine import Machine, sysfs_bus_id


def reported_addresses(survey: Survey) -> dict[int, str]:
    """By index, as the GPUs say."""
    return {d.index: sysfs_bus_id(d.bus_id) for d in survey.devices if d.bus_id}


def bound(machine: Machine) -> set[str]:
    """Addresses of the GPUs that the nvidia driver has."""
    given = {gpu.bus_id for gpu in machine.pci_gpus if gpu.driver == "nvidia"}
    return given | set(machine.names("/proc/driver/nvidia/gpus"))


def addresses(machine: Machine, survey: Survey) -> dict[int, str]:
    """Addresses by index; where exactly the silent ones are missing, theirs are inferred.

    NVML counts in the order of the PCI bus (nvml.h, nvmlDeviceGetHandleByIndex_v2).
    """
    known = reported_addresses(survey)
    silent = [device.index for device in survey.devices if device.index not in known]
    missing = sorted(bound(machine) - set(known.values()))
    if len(silent) == len(missing):
        known |= dict(zip(silent, missing, strict=True))
    return known
