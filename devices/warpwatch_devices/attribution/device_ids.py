"""Finds the devices that the kubelet lists: its ids, and the sampled devices that they mean.

The forms of ids, with <uuid> for 8-4-4-4-12 hexadecimal digits:

    GPU-<uuid>  MIG-<uuid>            NVIDIA's device plugin; ``::<n>`` at the end: a replica
    MIG-GPU-<uuid>/<gi>/<ci>          a MIG instance of drivers before R470
    nvidia<N>  nvidia<N>/gi<M>        GKE's device plugin; ``/vgpu<K>`` at the end: a replica
    gpu-<N>                           NVIDIA's driver for dynamic resource allocation
    gpu-<N>-mig-<profile>-<id>-<start>   its MIG instances
    <vendor>/<class>=<name>           the container device interface; the name is a UUID, an index
                                      (0, 0:1, gpu0, mig0:1) or a name of the driver

An id that only resembles a form is ignored: schedulers that choose the GPU themselves use ids that
look alike and mean nothing (GPU-<uuid>-<n>).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from warpwatch_telemetry.samples import Device, DeviceSample, Workload

# No id is longer: a qualified CDI name of the DRA driver has about 120 characters.
MAX_ID_LENGTH = 512

_UUID = r"[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}"
_NUMBER = r"[0-9]{1,4}"
_BY_UUID = re.compile(rf"((?:GPU|MIG)-{_UUID})(::{_NUMBER})?", re.ASCII)
_BY_PARENT = re.compile(rf"MIG-(GPU-{_UUID})/({_NUMBER})/{_NUMBER}(::{_NUMBER})?", re.ASCII)
_BY_NODE = re.compile(rf"nvidia({_NUMBER})(?:/gi({_NUMBER}))?(/vgpu{_NUMBER})?", re.ASCII)
_DRIVER_GPU = re.compile(rf"gpu-({_NUMBER})", re.ASCII)
_DRIVER_MIG = re.compile(
    rf"gpu-({_NUMBER})-mig-([0-9]+g[0-9a-z-]*?)-{_NUMBER}-({_NUMBER})", re.ASCII
)
_BY_INDEX = re.compile(rf"(?:gpu|mig)?({_NUMBER})(?::({_NUMBER}))?", re.ASCII)
# The driver uses k8s.gpu.nvidia.com, the container toolkit nvidia.com.
_CDI_VENDOR = "nvidia.com"
# The DRA driver puts the claim's UID before a device's name.
_CLAIM_UID = re.compile(rf"{_UUID}-(?=gpu-)", re.ASCII)


@dataclass(frozen=True, slots=True)
class DeviceReference:
    """The parts of an id that name a device; missing parts are None or empty.

    ``uuid`` is the GPU or MIG instance, and the parent GPU if ``gpu_instance`` is set. ``minor`` is
    the N of /dev/nvidiaN, ``index`` is NVML's. ``mig_index``, ``gpu_instance``, ``profile``
    (without dot) and ``placement`` name the instance on the GPU. ``shared``: the device may have
    several holders.
    """

    uuid: str = ""
    minor: int | None = None
    index: int | None = None
    mig_index: int | None = None
    gpu_instance: str = ""
    profile: str = ""
    placement: int | None = None
    shared: bool = False


def parse_device_id(text: str) -> DeviceReference | None:
    """Return the device of a device plugin's id, or None for an unknown form."""
    if match := _BY_UUID.fullmatch(text):
        return DeviceReference(uuid=match[1], shared=match[2] is not None)
    if match := _BY_PARENT.fullmatch(text):
        return DeviceReference(uuid=match[1], gpu_instance=match[2], shared=match[3] is not None)
    if match := _BY_NODE.fullmatch(text):
        gpu_instance = match[2] or ""
        return DeviceReference(
            minor=int(match[1]), gpu_instance=gpu_instance, shared=match[3] is not None
        )
    return None


def parse_driver_name(text: str) -> DeviceReference | None:
    """Return the device that the DRA driver calls ``text``; several pods may hold a claim."""
    if len(text) > MAX_ID_LENGTH:
        return None
    if match := _DRIVER_GPU.fullmatch(text):
        return DeviceReference(minor=int(match[1]), shared=True)
    if match := _DRIVER_MIG.fullmatch(text):
        return DeviceReference(
            minor=int(match[1]), profile=match[2], placement=int(match[3]), shared=True
        )
    return None


def parse_cdi_name(text: str) -> DeviceReference | None:
    """Return the device of a qualified name of the container device interface."""
    if len(text) > MAX_ID_LENGTH:
        return None
    kind, _, name = text.rpartition("=")
    if match := _BY_UUID.fullmatch(name):
        return DeviceReference(uuid=match[1], shared=True)
    if not kind.partition("/")[0].endswith(_CDI_VENDOR):
        return None
    if match := _BY_INDEX.fullmatch(name):
        mig_index = int(match[2]) if match[2] is not None else None
        return DeviceReference(index=int(match[1]), mig_index=mig_index, shared=True)
    return parse_driver_name(_CLAIM_UID.sub("", name, count=1))


# NVIDIA's driver for dynamic resource allocation.
GPU_DRIVER = "gpu.nvidia.com"
_RESOURCES = ("nvidia.com/gpu", "nvidia.com/gpu.shared")
_MIG_RESOURCE_PREFIX = "nvidia.com/mig-"
_SHARED_SUFFIX = ".shared"
# Names of Kubernetes objects are DNS subdomains.
_MAX_NAME_LENGTH = 253


@dataclass(frozen=True, slots=True)
class ListedDevice:
    """A device of a container, as the kubelet lists it.

    ``resource`` is the extended resource, or the driver of a claim. Only claims have ``cdi_names``,
    names in the container device interface.
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
    """Return the GPUs among the devices, and the unreadable ids of GPUs."""
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
    """Return the device of a resource of any name: other plugins than NVIDIA's use UUIDs too."""
    reference = parse_device_id(device.device_id)
    if reference is not None and device.resource.endswith(_SHARED_SUFFIX):
        return replace(reference, shared=True)
    return reference


def _claimed(device: ListedDevice) -> DeviceReference | None:
    """Return the claimed device: UUIDs are preferred to the driver's names, then indices."""
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
        """Return the UUID of the device, or None if it is unknown or ambiguous."""
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
        """Return the possible indices of the GPU; an instance has its parent's."""
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
    """Return only the letters and digits: the DRA driver writes ``1g.10gb+me`` so."""
    return "".join(char for char in profile if char.isalnum())


def _minor(device: Device) -> int:
    minor = device.info.get("minor_number", "")
    return int(minor) if minor.isdecimal() else device.index
