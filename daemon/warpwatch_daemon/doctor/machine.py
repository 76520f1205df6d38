"""The node as its files describe it: /proc, /sys, /dev and the environment of this process."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from warpwatch_daemon.doctor.facts import Survey

_NVIDIA = "0x10de"
# PCI class codes of GPUs: VGA controller and 3D controller.
_GPU_CLASSES = ("0x0300", "0x0302")
_FILE_LIMIT_BYTES = 1 << 20
_CONTAINER_FILES = (".dockerenv", "run/.containerenv")
_CONTAINER_GROUPS = ("kubepods", "docker", "containerd", "libpod", "lxc", "crio")

CAP_SYS_ADMIN = 21


@dataclass(frozen=True, slots=True)
class PciGpu:
    """``driver``: the kernel driver bound to it, None for none. ``lost``: fallen off the bus."""

    bus_id: str
    driver: str | None
    lost: bool


@dataclass(frozen=True)
class Machine:
    """``root`` is where the node's file tree begins."""

    root: Path = Path("/")
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    uid: int = field(default_factory=os.geteuid)

    def path(self, name: str | Path) -> Path:
        return self.root / str(name).lstrip("/")

    def text(self, name: str) -> str | None:
        """The beginning of a file, None where it cannot be read."""
        try:
            with self.path(name).open("rb") as file:
                return file.read(_FILE_LIMIT_BYTES).decode(errors="replace").strip()
        except OSError:
            return None

    def names(self, folder: str) -> list[str]:
        """What is in a folder, sorted; nothing where it cannot be read."""
        try:
            return sorted(entry.name for entry in self.path(folder).iterdir())
        except OSError:
            return []

    def link(self, name: str) -> str | None:
        """The last part of what a link points to."""
        try:
            return Path(os.readlink(self.path(name))).name
        except OSError:
            return None

    def number(self, name: str) -> int | None:
        try:
            return int(self.text(name) or "")
        except ValueError:
            return None

    def modules(self) -> set[str]:
        """The kernel modules that are loaded."""
        return {line.split()[0] for line in (self.text("/proc/modules") or "").splitlines() if line}

    def has_capability(self, bit: int) -> bool:
        """Whether this process holds a capability (bits of capabilities(7))."""
        for line in (self.text("/proc/self/status") or "").splitlines():
            if line.startswith("CapEff:"):
                return bool(int(line.split()[1], 16) >> bit & 1)
        return False

    @cached_property
    def in_container(self) -> bool:
        groups = self.text("/proc/self/cgroup") or ""
        return (
            any(self.path(name).exists() for name in _CONTAINER_FILES)
            or "KUBERNETES_SERVICE_HOST" in self.environ
            or any(word in groups for word in _CONTAINER_GROUPS)
        )

    @cached_property
    def pci_gpus(self) -> tuple[PciGpu, ...]:
        """NVIDIA's GPUs on the PCI bus, whatever driver they have."""
        return tuple(self._pci_gpus())

    def _pci_gpus(self) -> list[PciGpu]:
        found = []
        for bus_id in self.names("/sys/bus/pci/devices"):
            folder = f"/sys/bus/pci/devices/{bus_id}"
            if self.text(f"{folder}/vendor") != _NVIDIA:
                continue
            if not (self.text(f"{folder}/class") or "").startswith(_GPU_CLASSES):
                continue
            found.append(PciGpu(bus_id, self.link(f"{folder}/driver"), self._lost(folder)))
        return found

    def _lost(self, folder: str) -> bool:
        """A device that is gone from the bus reads as all ones in its configuration space."""
        try:
            with self.path(f"{folder}/config").open("rb") as file:
                return file.read(4) == b"\xff\xff\xff\xff"
        except OSError:
            return False


def sysfs_bus_id(bus_id: str) -> str:
    """NVML's ``00000000:1B:00.0`` as sysfs writes it: ``0000:1b:00.0``."""
    domain, _, rest = bus_id.partition(":")
    return f"{int(domain, 16):04x}:{rest.lower()}"


def reported_addresses(survey: Survey) -> dict[int, str]:
    """By index, as the GPUs say."""
    return {d.index: sysfs_bus_id(d.bus_id) for d in survey.devices if d.bus_id}


def bound_addresses(machine: Machine) -> set[str]:
    """Addresses of the GPUs that the nvidia driver has."""
    given = {gpu.bus_id for gpu in machine.pci_gpus if gpu.driver == "nvidia"}
    return given | set(machine.names("/proc/driver/nvidia/gpus"))


def addresses(machine: Machine, survey: Survey) -> dict[int, str]:
    """Addresses by index; where exactly the silent ones are missing, theirs are inferred.

    NVML counts in the order of the PCI bus (nvml.h, nvmlDeviceGetHandleByIndex_v2).
    """
    known = reported_addresses(survey)
    silent = [device.index for device in survey.devices if device.index not in known]
    missing = sorted(bound_addresses(machine) - set(known.values()))
    if len(silent) == len(missing):
        known |= dict(zip(silent, missing, strict=True))
    return known
