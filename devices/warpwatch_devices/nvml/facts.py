"""What describes a device and is read once, when its handle is opened."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pynvml

from warpwatch_devices.memory_groups import read_text
from warpwatch_devices.nvml.costs import CallCosts
from warpwatch_devices.nvml.library import judge

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


def identify(handle: Any, costs: CallCosts) -> tuple[str, str]:
    """UUID and name. Raises NVMLError."""
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
    """What the device says of itself; what it does not say is left out.

    Raises LibraryGone, DeviceGone.
    """
    facts = {"driver_load": load} if (load := driver_load()) else {}
    for name, read in _FACTS.items():
        try:
            text = str(costs.measure(_ACCOUNT, read, handle))
        except pynvml.NVMLError as error:
            judge(error)
            continue
        except UnicodeDecodeError:
            continue
        if text:
            facts[name] = text
    return facts


def count_fans(handle: Any, costs: CallCosts) -> int:
    """Raises LibraryGone, DeviceGone."""
    try:
        return int(costs.measure(_ACCOUNT, pynvml.nvmlDeviceGetNumFans, handle))
    except pynvml.NVMLError as error:
        judge(error)
        return 0
