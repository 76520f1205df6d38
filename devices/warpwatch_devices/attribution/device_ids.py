"""What the device ids of the kubelet's plugins and drivers say of a device.

The forms, with <uuid> for 8-4-4-4-12 hexadecimal digits:

    GPU-<uuid>  MIG-<uuid>            NVIDIA's device plugin; ``::<n>`` behind them: a replica
    MIG-GPU-<uuid>/<gi>/<ci>          a MIG instance of drivers before R470
    nvidia<N>  nvidia<N>/gi<M>        GKE's device plugin; ``/vgpu<K>`` behind them: a replica
    gpu-<N>                           NVIDIA's driver for dynamic resource allocation
    gpu-<N>-mig-<profile>-<id>-<start>   its MIG instances
    <vendor>/<class>=<name>           the container device interface; the name is a UUID, an index
                                      (0, 0:1, gpu0, mig0:1) or one of the driver's names

An id that only resembles one of these is none of them: schedulers that choose the GPU
themselves hand out ids that look alike and mean nothing (GPU-<uuid>-<n>).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

# No id is longer: a qualified CDI name of the DRA driver has some 120 characters.
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
# Of the driver k8s.gpu.nvidia.com, of the container toolkit nvidia.com.
_CDI_VENDOR = "nvidia.com"
# What the DRA driver puts before a device's name: the UID of the claim.
_CLAIM_UID = re.compile(rf"{_UUID}-(?=gpu-)", re.ASCII)


@dataclass(frozen=True, slots=True)
class DeviceReference:
    """A device as an id names it; what the id does not say is None or empty.

    uuid: of the GPU or MIG instance; with ``gpu_instance`` that of the GPU around it.
    minor: the number N of /dev/nvidiaN. index: the driver's own, as NVML has it.
    mig_index, gpu_instance, profile (without dot), placement: which instance on the GPU.
    shared: others may hold the same device with right.
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
    """The device that an id of a device plugin names, None where it has no known form."""
    if len(text) > MAX_ID_LENGTH:
        return None
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
    """The device that the DRA driver calls ``text``; a claim may be held by several pods."""
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
    """The device behind a qualified name of the container device interface."""
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
