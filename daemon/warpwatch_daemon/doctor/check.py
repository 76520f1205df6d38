"""Provides findings, and the inputs of the checks: the node's files and environment among them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path

from warpwatch_daemon.api_client import ApiClient
from warpwatch_daemon.config import Config
from warpwatch_devices.nvml.survey import PciGpu, Survey, pci_gpus

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


# The values of Check.ok.
OK, NOTE, BAD = True, None, False


@dataclass(frozen=True, slots=True)
class Check:
    """A finding. ``ok`` None: no fault, but worth knowing. ``advice``: a command or setting."""

    name: str
    ok: bool | None
    detail: str
    advice: str = ""
    group: str = ""


@dataclass(frozen=True, slots=True)
class CheckInputs:
    """The subjects of the checks. ``here``: this machine is examined, not a daemon elsewhere."""

    config: Config
    api: ApiClient
    machine: Machine
    survey: Survey
    here: bool = True


Group = Callable[[CheckInputs], Iterator[Check]]


def gpu_set(indices: Iterable[int]) -> str:
    """Return ``0,1,2,5`` as ``GPU 0-2,5``."""
    ordered = sorted(indices)
    starts = [ordered[0], *(b for a, b in pairwise(ordered) if b != a + 1)]
    ends = [*(a for a, b in pairwise(ordered) if b != a + 1), ordered[-1]]
    runs = zip(starts, ends, strict=True)
    return "GPU " + ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def listed(names: list[str], limit: int) -> str:
    """Return the first ``limit`` names and the number of the others."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def merged(found: Iterable[tuple[int, Check | None]]) -> Iterator[Check]:
    """Yield each finding once with all its GPUs, faults first; ``{gpus}`` in advice is their list.

    A GPU without a finding has None.
    """
    same: dict[Check, list[int]] = {}
    for index, check in found:
        if check is not None:
            same.setdefault(check, []).append(index)
    for check in sorted(same, key=lambda check: (check.ok is not BAD, check.ok is OK)):
        numbers = ",".join(str(index) for index in sorted(same[check]))
        yield replace(
            check,
            detail=f"{gpu_set(same[check])}: {check.detail}",
            advice=check.advice.replace("{gpus}", numbers),
        )
