"""Reads the node's files in /proc, /sys and /dev, and the environment of this process."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from warpwatch_devices.nvml.facts import PciGpu, pci_gpus
from warpwatch_devices.nvml.survey import Survey

_FILE_LIMIT_BYTES = 1 << 20
_CONTAINER_FILES = (".dockerenv", "run/.containerenv")
_CONTAINER_GROUPS = ("kubepods", "docker", "containerd", "libpod", "lxc", "crio")

CAP_SYS_ADMIN = 21


@dataclass(frozen=True)
class Machine:
    """The node whose file tree begins at ``root``."""

    root: Path = Path("/")
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    uid: int = field(default_factory=os.geteuid)

    def path(self, name: str | Path) -> Path:
        return self.root / str(name).lstrip("/")

    def text(self, name: str) -> str | None:
        """Return the beginning of a file, or None if it cannot be read."""
        try:
            with self.path(name).open("rb") as file:
                return file.read(_FILE_LIMIT_BYTES).decode(errors="replace").strip()
        except OSError:
            return None

    def names(self, folder: str) -> list[str]:
        """Return the sorted names in a folder; empty if it cannot be read."""
        try:
            return sorted(entry.name for entry in self.path(folder).iterdir())
        except OSError:
            return []

    def link(self, name: str) -> str | None:
        """Return the last part of a link's target."""
        try:
            return Path(os.readlink(self.path(name))).name
        except OSError:
            return None

    def has_capability(self, bit: int) -> bool:
        """Return whether this process holds a capability (bits of capabilities(7))."""
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
        return pci_gpus(self.root)

    @property
    def bound_addresses(self) -> set[str]:
        """Addresses of the GPUs that the nvidia driver has."""
        bound = {gpu.bus_id for gpu in self.pci_gpus if gpu.driver == "nvidia"}
        return bound | set(self.names("/proc/driver/nvidia/gpus"))

    def gpu_addresses(self, survey: Survey) -> dict[int, str]:
        """Return PCI addresses by GPU; those of silent GPUs are inferred if the counts match.

        NVML counts in the order of the PCI bus (nvml.h, nvmlDeviceGetHandleByIndex_v2).
        """
        known = {gpu.index: gpu.address for gpu in survey.gpus if gpu.address}
        silent = [gpu.index for gpu in survey.gpus if not gpu.address]
        missing = sorted(self.bound_addresses - set(known.values()))
        if len(silent) == len(missing):
            known |= dict(zip(silent, missing, strict=True))
        return known
