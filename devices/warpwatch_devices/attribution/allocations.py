"""What the kubelet lists, and which of it is about GPUs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from warpwatch_devices.attribution.device_ids import (
    DeviceReference,
    parse_cdi_name,
    parse_device_id,
    parse_driver_name,
)
from warpwatch_telemetry.samples import Workload

# NVIDIA's driver for dynamic resource allocation.
GPU_DRIVER = "gpu.nvidia.com"
_RESOURCES = ("nvidia.com/gpu", "nvidia.com/gpu.shared")
_MIG_RESOURCE_PREFIX = "nvidia.com/mig-"
_SHARED_SUFFIX = ".shared"
# Names of Kubernetes objects are DNS subdomains.
_MAX_NAME_LENGTH = 253


@dataclass(frozen=True, slots=True)
class ListedDevice:
    """One device of one container, as the kubelet lists it.

    ``resource`` is the extended resource, or the driver of a claim; ``cdi_names`` has the device's
    names in the container device interface, for claims alone.
    """

    workload: Workload
    resource: str
    device_id: str
    cdi_names: tuple[str, ...] = ()
    claimed: bool = False


@dataclass(frozen=True, slots=True)
class Allocation:
    """A GPU that a container holds."""

    workload: Workload
    device_id: str
    device: DeviceReference


def allocations_of(listed: Iterable[ListedDevice]) -> tuple[list[Allocation], set[str]]:
    """The GPUs among the devices, and the ids that should mean a GPU but cannot be read."""
    allocations = []
    unreadable = set()
    for device in listed:
        reference = _claimed(device) if device.claimed else _plugged(device)
        if reference is not None and _is_valid(device.workload):
            allocations.append(Allocation(device.workload, device.device_id, reference))
        elif reference is not None or _is_gpu(device):
            unreadable.add(device.device_id[:100])
    return allocations, unreadable


def _plugged(device: ListedDevice) -> DeviceReference | None:
    """Of a resource of any name: others than NVIDIA's plugin give GPUs out by their UUIDs, too."""
    reference = parse_device_id(device.device_id)
    if reference is not None and device.resource.endswith(_SHARED_SUFFIX):
        return replace(reference, shared=True)
    return reference


def _claimed(device: ListedDevice) -> DeviceReference | None:
    """A UUID says more than the driver's name, which says more than an index."""
    named = [parse_cdi_name(name) for name in device.cdi_names]
    references = [reference for reference in named if reference is not None]
    for reference in references:
        if reference.uuid:
            return reference
    own = parse_driver_name(device.device_id) if device.resource == GPU_DRIVER else None
    return own or next(iter(references), None)


def _is_gpu(device: ListedDevice) -> bool:
    resource = device.resource
    if device.claimed:
        return resource == GPU_DRIVER
    return resource in _RESOURCES or resource.startswith(_MIG_RESOURCE_PREFIX)


def _is_valid(workload: Workload) -> bool:
    names = (workload.namespace, workload.pod, workload.container)
    return all(0 < len(name) <= _MAX_NAME_LENGTH and name.isprintable() for name in names)
