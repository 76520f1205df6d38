"""Checks how GPUs reach each other: NVLink, fabric, peer access, IOMMU, and NCCL's variables.

The variables are those of this shell, of /etc/nccl.conf and of the processes on the GPUs. Only
variables of nccl.csv are read, and only suspicious ones are shown. Their meanings are those of
NVIDIA's NCCL user guide and of PyTorch's ProcessGroupNCCL environment variables.
"""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import pynvml

from warpwatch_daemon.doctor.check import (
    BAD,
    NOTE,
    OK,
    Check,
    CheckInputs,
    Machine,
    gpu_set,
    listed,
    merged,
)
from warpwatch_devices.attribution.control_groups import MAX_PROCESSES
from warpwatch_devices.nvml.survey import PCI_DEVICES, GpuReading, Survey
from warpwatch_devices.processes import list_pids, sees_host_processes

_PEER_ACCESS = {
    1: "the chipset does not support it",
    2: "the GPUs do not support it",
    3: "the path between them does not support it",
    4: "it is disabled by a driver setting",
    5: "it is not supported",
}
_FABRIC_STATES = {1: "not started", 2: "in progress"}
# Shifts in the health mask; the two bits are 1 if it is so.
_FABRIC_TROUBLES = {
    pynvml.NVML_GPU_FABRIC_HEALTH_MASK_SHIFT_DEGRADED_BW: "bandwidth is degraded",
    pynvml.NVML_GPU_FABRIC_HEALTH_MASK_SHIFT_ROUTE_RECOVERY: "routes are being recovered",
    pynvml.NVML_GPU_FABRIC_HEALTH_MASK_SHIFT_ROUTE_UNHEALTHY: "a route is unhealthy",
    pynvml.NVML_GPU_FABRIC_HEALTH_MASK_SHIFT_ACCESS_TIMEOUT_RECOVERY: "accesses timed out",
}
_MANAGER = (
    "`systemctl status nvidia-fabricmanager`: it must run, in the driver's very version; then "
    "restart it and the GPU's users (`nvidia-smi -q | grep -A4 Fabric`)"
)


def topology_checks(inputs: CheckInputs) -> Iterator[Check]:
    machine, survey = inputs.machine, inputs.survey
    # The largest number of active links by model.
    best: Counter[str] = Counter()
    for gpu in survey.up:
        best[gpu.name] = max(best[gpu.name], sum(gpu.links.values()))
    yield from merged((gpu.index, _nvlink(gpu, best[gpu.name])) for gpu in survey.up)
    yield from merged((gpu.index, _fabric(gpu)) for gpu in survey.up)
    yield from _peer_access(survey)
    yield from _iommu(machine, survey)


def _nvlink(gpu: GpuReading, expected: int) -> Check | None:
    links = gpu.links
    if not links:
        return None
    if not expected:
        detail = f"none of {len(links)} links is active"
        advice = "bridges are fitted? On an NVSwitch system: nvidia-fabricmanager runs?"
        return Check("NVLink", NOTE, detail, advice)
    down = [str(link) for link, is_up in links.items() if not is_up]
    detail = f"{len(links) - len(down)} of {len(links)} links active"
    if len(links) - len(down) == expected:
        return Check("NVLink", OK, detail)
    advice = (
        "`nvidia-smi nvlink -s -i {gpus}`, `dmesg -T | grep -i -e nvlink -e Xid` (XID 74); reset "
        "all GPUs and nvidia-fabricmanager; if it stays: reseat or replace the GPU"
    )
    return Check("NVLink", BAD, f"{detail}, peers have {expected}; inactive: {', '.join(down)}",
                 advice)  # fmt: skip


def _fabric(gpu: GpuReading) -> Check | None:
    fabric = gpu.fabric
    if fabric is None or fabric.state == pynvml.NVML_GPU_FABRIC_STATE_NOT_SUPPORTED:
        return None
    advice = _MANAGER
    troubles = [text for shift, text in _FABRIC_TROUBLES.items() if fabric.health >> shift & 3 == 1]
    if fabric.state != pynvml.NVML_GPU_FABRIC_STATE_COMPLETED:
        state = _FABRIC_STATES.get(fabric.state, f"in state {fabric.state}")
        detail = f"registration {state}: CUDA programs fail (error 802)"
    elif fabric.status != pynvml.NVML_SUCCESS:
        detail = f"registration failed: {pynvml.NVMLError(fabric.status)}"
    elif troubles:
        detail = f"registered, but {', '.join(troubles)}"
        advice = "`nvidia-smi nvlink -s`, nvidia-fabricmanager's log, XIDs and SXids in dmesg"
    else:
        return Check("NVLink fabric", OK, "registered")
    return Check("NVLink fabric", BAD, detail, advice)


def _peer_access(survey: Survey) -> Iterator[Check]:
    answers = [pair.peer_access for pair in survey.pairs if pair.peer_access is not None]
    refused = Counter(filter(None, answers))
    if not refused:
        return
    status, pairs = refused.most_common(1)[0]
    why = _PEER_ACCESS.get(status, f"status {status}")
    some = f"{pairs} of them: " if len(refused) > 1 else ""
    detail = f"{sum(refused.values())} of {len(answers)} pairs copy through host memory "
    advice = "expect slower all-reduce between them; `nvidia-smi topo -p2p r` shows which"
    yield Check("peer access", NOTE, f"{detail}({some}{why})", advice)


def _iommu(machine: Machine, survey: Survey) -> Iterator[Check]:
    """Yield GPUs behind a translating IOMMU, which slows peer traffic over PCIe, not NVLink."""
    types = {
        gpu.index: machine.text(f"{PCI_DEVICES}/{gpu.address}/iommu_group/type") or ""
        for gpu in survey.up
        if gpu.address
    }
    translated = [index for index, kind in types.items() if kind.startswith("DMA")]
    if translated and len(survey.up) > 1:
        detail = f"{gpu_set(translated)} behind a translating IOMMU: slower peer copies and RDMA"
        advice = "kernel command line `iommu=pt` (and ACS off in the BIOS), on bare metal"
        yield Check("IOMMU", NOTE, detail, advice)


_CONFIGURATION = "/etc/nccl.conf"
_MAX_VALUE = 60
_MAX_OWNERS = 3
_OFF = ("0", "false", "n", "no", "off")


class Network(NamedTuple):
    """The names that values refer to. ``interfaces`` None: not known."""

    interfaces: frozenset[str] | None
    adapters: frozenset[str]


# An owner, its known variables and what their values refer to.
Environment = tuple[str, Mapping[str, str], Network]


class Variable(NamedTuple):
    """A row of the table. ``names``: synonyms. ``test``: a key of _TESTS or =A|B."""

    names: str
    test: str
    is_a: str
    meaning: str
    advice: str

    def suspects(self, value: str, network: Network) -> bool:
        value = value.strip()
        if self.test.startswith("="):
            return value.upper() in self.test[1:].split("|")
        return _TESTS[self.test](value, network)


def _is_on(value: str) -> bool:
    return value.lower() not in ("", *_OFF)


def _names_nothing(value: str, names: frozenset[str] | None) -> bool:
    """Return whether a list matches no name.

    ``eth,ib`` are prefixes, ``=eth0`` is exact, ``^docker`` excludes, ``mlx5_0:1`` has a port.
    """
    if names is None or value.startswith("^"):
        return False
    wanted = [each.partition(":")[0] for each in value.removeprefix("=").split(",")]
    if value.startswith("="):
        return not names & set(wanted)
    return not any(each and name.startswith(each) for name in names for each in wanted)


_TESTS: dict[str, Callable[[str, Network], bool]] = {
    "on": lambda value, _: _is_on(value),
    "off": lambda value, _: value.lower() in _OFF,
    "set": lambda value, _: bool(value),
    "on_with_adapters": lambda value, network: bool(network.adapters) and _is_on(value),
    "on_without_adapters": lambda value, network: not network.adapters and _is_on(value),
    "no_interface": lambda value, network: _names_nothing(value, network.interfaces),
    "no_adapter": lambda value, network: _names_nothing(value, network.adapters or None),
    "loopback": lambda value, _: value.lstrip("=") == "lo",
}
with Path(__file__).with_name("nccl.csv").open(newline="") as _file:
    VARIABLES = tuple(Variable(*row) for row in list(csv.reader(_file))[1:])
NAMES = frozenset(name for variable in VARIABLES for name in variable.names.split())


def nccl_checks(inputs: CheckInputs) -> Iterator[Check]:
    environments, unreadable = _environments(inputs.machine, inputs.survey)
    owners: dict[tuple[Variable, str, str], list[str]] = {}
    for owner, values, network in environments:
        for variable in VARIABLES:
            for name in values.keys() & set(variable.names.split()):
                if variable.suspects(values[name], network):
                    owners.setdefault((variable, name, values[name]), []).append(owner)
    for (variable, name, value), setters in owners.items():
        shown = "".join(c if c.isprintable() else "?" for c in value)[:_MAX_VALUE]
        detail = f"set to {shown} ({listed(setters, _MAX_OWNERS)}): {variable.meaning}"
        yield Check(name, BAD if variable.is_a == "fault" else NOTE, detail, variable.advice)
    processes = sum(1 for owner, *_ in environments if owner.startswith("pid "))
    if not owners:
        on_gpus = f"{processes} processes on GPUs" if processes > 1 else "1 process on a GPU"
        where = f"this shell and {on_gpus}" if processes else "this shell"
        yield Check("environment", OK, f"nothing suspicious in {where}")
    if unreadable:
        advice = "sudo warpwatch doctor, in the host's PID namespace"
        detail = f"of {unreadable} processes on GPUs it cannot be read"
        yield Check("environment", NOTE, detail, advice)


def _environments(machine: Machine, survey: Survey) -> tuple[list[Environment], int]:
    """Return all readable environments, and the number of processes without one."""
    adapters = frozenset(machine.names("/sys/class/infiniband"))
    here = Network(_interfaces(machine, "self"), adapters)
    own = (f"{name}={value}" for name, value in machine.environ.items())
    found: list[Environment] = [("this shell", _known(own), here)]
    settings = machine.text(_CONFIGURATION)
    if settings is not None:
        found.append((_CONFIGURATION, _known(settings.splitlines()), here))
    unreadable = 0
    for pid in _gpu_processes(machine, survey)[:MAX_PROCESSES]:
        text = machine.text(f"/proc/{pid}/environ")
        if text is None:
            unreadable += machine.path(f"/proc/{pid}").exists()
            continue
        network = Network(_interfaces(machine, str(pid)), adapters)
        found.append((f"pid {pid}", _known(text.split("\0")), network))
    return found, unreadable


def _known(assignments: Iterable[str]) -> dict[str, str]:
    pairs = (assignment.strip().partition("=") for assignment in assignments)
    return {name.strip(): value.strip() for name, _, value in pairs if name.strip() in NAMES}


def _interfaces(machine: Machine, process: str) -> frozenset[str] | None:
    text = machine.text(f"/proc/{process}/net/dev")
    if text is None:
        return None
    return frozenset(line.partition(":")[0].strip() for line in text.splitlines() if ":" in line)


def _gpu_processes(machine: Machine, survey: Survey) -> list[int]:
    """Return PIDs of this namespace; the driver has only those of the host's."""
    proc = machine.path("/proc")
    if sees_host_processes(proc):
        return sorted({pid for gpu in survey.up for pid in gpu.processes})
    pids = sorted(list_pids(proc)) if proc.exists() else []
    return [pid for pid in pids if _has_gpu_open(machine, pid)]


def _has_gpu_open(machine: Machine, pid: int) -> bool:
    folder = f"/proc/{pid}/fd"
    targets = (machine.link(f"{folder}/{name}") or "" for name in machine.names(folder))
    return any(target.removeprefix("nvidia").isdigit() for target in targets)
