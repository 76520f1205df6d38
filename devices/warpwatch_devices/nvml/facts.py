"""Describes devices: what NVML says once, when a handle is opened, and the GPUs on the PCI bus."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pynvml

from warpwatch_devices.memory_groups import read_text
from warpwatch_devices.nvml.library import CallCosts, classify

_ARCHITECTURES = {
    pynvml.NVML_DEVICE_ARCH_KEPLER: "Kepler",
    pynvml.NVML_DEVICE_ARCH_MAXWELL: "Maxwell",
    pynvml.NVML_DEVICE_ARCH_PASCAL: "Pascal",
    pynvml.NVML_DEVICE_ARCH_VOLTA: "Volta",
    pynvml.NVML_DEVICE_ARCH_TURING: "Turing",
    pynvml.NVML_DEVICE_ARCH_AMPERE: "Ampere",
    pynvml.NVML_DEVICE_ARCH_ADA: "Ada",
    pynvml.NVML_DEVICE_ARCH_HOPPER: "Hopper",
    pynvml.NVML_DEVICE_ARCH_BLACKWELL: "Blackwell",
}
# By its label in warpwatch_device_info; container runtimes name devices by the minor number.
_FACTS: dict[str, Callable[[Any], str]] = {
    "driver_version": lambda handle: pynvml.nvmlSystemGetDriverVersion(),
    "pci_bus_id": lambda handle: pynvml.nvmlDeviceGetPciInfo_v3(handle).busId,
    "vbios_version": lambda handle: pynvml.nvmlDeviceGetVbiosVersion(handle),
    "serial": lambda handle: pynvml.nvmlDeviceGetSerial(handle),
    "minor_number": lambda handle: str(pynvml.nvmlDeviceGetMinorNumber(handle)),
    "architecture": lambda handle: _ARCHITECTURES.get(pynvml.nvmlDeviceGetArchitecture(handle), ""),
}
_ACCOUNT = "facts"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_MODULE = Path("/sys/module/nvidia")
PCI_DEVICES = "/sys/bus/pci/devices"
_NVIDIA = "0x10de"
# PCI class codes: VGA controller and 3D controller.
_GPU_CLASSES = ("0x0300", "0x0302")
_CONFIG_BYTES = 4


def identify(handle: Any, costs: CallCosts) -> tuple[str, str]:
    """Return UUID and name. Raises NVMLError."""
    uuid: str = costs.measure(_ACCOUNT, pynvml.nvmlDeviceGetUUID, handle)
    name: str = costs.measure(_ACCOUNT, pynvml.nvmlDeviceGetName, handle)
    return uuid, name


def driver_load(boot_id: Path = _BOOT_ID, module: Path = _MODULE) -> str:
    """Return what differs after a reboot and after the driver was loaded again, "" if unknown.

    The kernel gives the folder of a module a new inode number whenever the module is loaded.
    """
    boot = read_text(boot_id).strip()
    try:
        return f"{boot}/{module.stat().st_ino}" if boot else ""
    except OSError:
        return boot


def read_facts(handle: Any, costs: CallCosts) -> dict[str, str]:
    """Return the labels that describe the device; unreadable ones are missing.

    Raises LibraryGone, DeviceGone.
    """
    facts = {"driver_load": load} if (load := driver_load()) else {}
    for name, read in _FACTS.items():
        try:
            text = str(costs.measure(_ACCOUNT, read, handle))
        except pynvml.NVMLError as error:
            classify(error)
            continue
        except UnicodeDecodeError:
            continue
        if text:
            facts[name] = text
    return facts


def count_fans(handle: Any, costs: CallCosts) -> int:
    """Return the number of fans. Raises LibraryGone, DeviceGone."""
    try:
        return int(costs.measure(_ACCOUNT, pynvml.nvmlDeviceGetNumFans, handle))
    except pynvml.NVMLError as error:
        classify(error)
        return 0


class PciGpu(NamedTuple):
    """A GPU on the bus. ``driver``: its kernel driver, if any. ``lost``: fallen off the bus."""

    bus_id: str
    driver: str | None
    lost: bool


def pci_gpus(root: Path = Path("/")) -> tuple[PciGpu, ...]:
    """Return NVIDIA's GPUs on the PCI bus, with any driver."""
    folders = sorted((root / PCI_DEVICES.lstrip("/")).glob("*"))
    return tuple(
        PciGpu(folder.name, _link(folder / "driver"), _is_lost(folder / "config"))
        for folder in folders
        if read_text(folder / "vendor").strip() == _NVIDIA
        and read_text(folder / "class").startswith(_GPU_CLASSES)
    )


def _link(path: Path) -> str | None:
    try:
        return path.readlink().name
    except OSError:
        return None


def _is_lost(config: Path) -> bool:
    """Return whether a device reads as all ones, as it does once it is gone from the bus."""
    try:
        with config.open("rb") as file:
            return file.read(_CONFIG_BYTES) == b"\xff" * _CONFIG_BYTES
    except OSError:
        return False
