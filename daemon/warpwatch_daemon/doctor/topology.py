"""How the GPUs reach each other and the host: NVLink, fabric, PCIe paths, NUMA nodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pynvml

from warpwatch_daemon.doctor.check import Check, CheckInputs, gpu_set, listed, merged
from warpwatch_daemon.doctor.facts import DeviceFacts, Survey
from warpwatch_daemon.doctor.machine import Machine, sysfs_bus_id

# NVML_TOPOLOGY_* in words, beside the abbreviation of `nvidia-smi topo -m`.
_PATHS = {
    pynvml.NVML_TOPOLOGY_INTERNAL: "the same board",
    pynvml.NVML_TOPOLOGY_SINGLE: "one PCIe switch (PIX)",
    pynvml.NVML_TOPOLOGY_MULTIPLE: "several PCIe switches (PXB)",
    pynvml.NVML_TOPOLOGY_HOSTBRIDGE: "the PCIe host bridge (PHB)",
    pynvml.NVML_TOPOLOGY_NODE: "host bridges of one NUMA node (NODE)",
    pynvml.NVML_TOPOLOGY_SYSTEM: "the link between NUMA nodes (SYS)",
}
_PEER_ACCESS = {
    1: "the chipset does not support it",
    2: "the GPUs do not support it",
    3: "the path between them does not support it",
    4: "it is disabled by a driver setting",
    5: "it is not supported",
}
_FABRIC_STATES = {1: "not started", 2: "in progress"}
# Shifts in the health mask; of each two bits 1 says that it is so.
_FABRIC_TROUBLES = {
    pynvml.NVML_GPU_FABRIC_HEALTH_MASK_SHIFT_DEGRADED_BW: "bandwidth is degraded",
    pynvml.NVML_GPU_FABRIC_HEALTH_MASK_SHIFT_ROUTE_RECOVERY: "routes are being recovered",
    pynvml.NVML_GPU_FABRIC_HEALTH_MASK_SHIFT_ROUTE_UNHEALTHY: "a route is unhealthy",
    pynvml.NVML_GPU_FABRIC_HEALTH_MASK_SHIFT_ACCESS_TIMEOUT_RECOVERY: "accesses timed out",
}
_MOST_PAIRS = 6
_MANAGER = (
    "`systemctl status nvidia-fabricmanager`: it must run, in the driver's very version; then "
    "restart it and the GPU's users (`nvidia-smi -q | grep -A4 Fabric`)"
)


def checks(inputs: CheckInputs) -> Iterator[Check]:
    machine, survey = inputs.machine, inputs.survey
    if not survey.up:
        return
    most = _most_links(survey)
    links = ((device.index, _nvlink(device, most)) for device in survey.up)
    yield from merged((index, check) for index, check in links if check)
    fabric = ((device.index, _fabric(device)) for device in survey.up)
    yield from merged((index, check) for index, check in fabric if check)
    yield from _paths(survey)
    yield from _peer_access(survey)
    yield from _numa(machine, survey)
    yield from _iommu(machine, survey)


def _active(device: DeviceFacts) -> int:
    return sum(1 for link in device.nvlinks or () if link.active)


def _most_links(survey: Survey) -> dict[str | None, int]:
    """The most active links of any GPU of each model."""
    most: dict[str | None, int] = {}
    for device in survey.up:
        most[device.name] = max(most.get(device.name, 0), _active(device))
    return most


def _nvlink(device: DeviceFacts, most: dict[str | None, int]) -> Check | None:
    if not device.nvlinks:
        return None
    active, expected = _active(device), most[device.name]
    if not expected:
        detail = f"none of {len(device.nvlinks)} links is active"
        advice = "bridges are fitted? On an NVSwitch system: nvidia-fabricmanager runs?"
        return Check("NVLink", None, detail, advice)
    if active == expected:
        return Check("NVLink", True, f"{active} of {len(device.nvlinks)} links active")
    down = [str(n) for n, link in enumerate(device.nvlinks) if link.active is False]
    detail = f"{active} of {len(device.nvlinks)} links active, peers have {expected}; inactive: "
    detail += ", ".join(down)
    advice = (
        "`nvidia-smi nvlink -s -i {gpus}`, `dmesg -T | grep -i -e nvlink -e Xid` (XID 74); reset "
        "all GPUs and nvidia-fabricmanager; if it stays: reseat or replace the GPU"
    )
    return Check("NVLink", False, detail, advice)


def _fabric(device: DeviceFacts) -> Check | None:
    fabric = device.fabric
    if fabric is None or fabric.state == pynvml.NVML_GPU_FABRIC_STATE_NOT_SUPPORTED:
        return None
    if fabric.state != pynvml.NVML_GPU_FABRIC_STATE_COMPLETED:
        state = _FABRIC_STATES.get(fabric.state, f"in state {fabric.state}")
        detail = f"registration {state}: CUDA programs fail (error 802)"
        return Check("NVLink fabric", False, detail, _MANAGER)
    if fabric.status != pynvml.NVML_SUCCESS:
        error = pynvml.NVMLError(fabric.status)
        return Check("NVLink fabric", False, f"registration failed: {error}", _MANAGER)
    troubles = [text for shift, text in _FABRIC_TROUBLES.items() if fabric.health >> shift & 3 == 1]
    if troubles:
        advice = "`nvidia-smi nvlink -s`, nvidia-fabricmanager's log, XIDs and SXids in dmesg"
        return Check("NVLink fabric", False, f"registered, but {', '.join(troubles)}", advice)
    return Check("NVLink fabric", True, "registered")


def _joined(first: DeviceFacts, second: DeviceFacts) -> str | None:
    """How NVLink joins two GPUs; None: it does not."""
    both = [link for device in (first, second) for link in device.nvlinks or () if link.active]
    switched = [link for link in both if link.remote_type == pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH]
    if switched and _active(second) and _active(first):
        return "NVLink and NVSwitch"
    buses = {link.remote_bus_id for link in first.nvlinks or () if link.active}
    return "NVLink" if second.bus_id in buses else None


def _paths(survey: Survey) -> Iterator[Check]:
    """All pairs, counted by how they reach each other."""
    up = {device.index: device for device in survey.up}
    kinds: dict[str, list[str]] = {}
    for (first, second), ancestor in sorted(survey.ancestors.items()):
        if first in up and second in up:
            path = _PATHS.get(ancestor, f"level {ancestor}")
            kind = _joined(up[first], up[second]) or path
            kinds.setdefault(kind, []).append(f"{first}-{second}")
    if not kinds:
        return
    if len(kinds) == 1:
        ((kind, pairs),) = kinds.items()
        which = f"all {len(pairs)}" if len(pairs) > 1 else pairs[0]
        yield Check("GPU pairs", True, f"{which} through {kind}")
        return
    shown = (f"{kind}: {listed(pairs, _MOST_PAIRS)}" for kind, pairs in kinds.items())
    yield Check("GPU pairs", True, "; ".join(shown))


def _peer_access(survey: Survey) -> Iterator[Check]:
    refused = Counter(status for status in survey.peer_access.values() if status)
    if not refused:
        return
    status, pairs = refused.most_common(1)[0]
    why = _PEER_ACCESS.get(status, f"status {status}")
    some = f"{pairs} of them: " if len(refused) > 1 else ""
    detail = f"{sum(refused.values())} of {len(survey.peer_access)} pairs copy through host "
    detail += f"memory ({some}{why})"
    advice = "expect slower all-reduce between them; `nvidia-smi topo -p2p r` shows which"
    yield Check("peer access", None, detail, advice)


def _numa(machine: Machine, survey: Survey) -> Iterator[Check]:
    nodes: dict[int, list[int]] = {}
    for device in survey.up:
        node = _number(machine, device, "numa_node")
        if node is not None and node >= 0:
            nodes.setdefault(node, []).append(device.index)
    if not nodes:
        return
    placed = []
    for node, gpus in sorted(nodes.items()):
        cpus = machine.text(f"/sys/devices/system/node/node{node}/cpulist") or "?"
        placed.append(f"{gpu_set(gpus)} on node {node} (CPUs {cpus})")
    detail = "; ".join(placed)
    if len(nodes) == 1:
        yield Check("NUMA", True, detail)
        return
    advice = "bind each rank and its data loaders to its GPU's node: `numactl --cpunodebind=N`"
    yield Check("NUMA", None, detail, advice)


def _number(machine: Machine, device: DeviceFacts, name: str) -> int | None:
    return machine.number(f"{_sysfs(device)}/{name}") if device.bus_id else None


def _sysfs(device: DeviceFacts) -> str:
    return f"/sys/bus/pci/devices/{sysfs_bus_id(device.bus_id or '')}"


def _iommu(machine: Machine, survey: Survey) -> Iterator[Check]:
    """Peer traffic over PCIe goes through an IOMMU that translates; NVLink does not."""
    translated = [
        device.index
        for device in survey.up
        if device.bus_id
        and (machine.text(f"{_sysfs(device)}/iommu_group/type") or "").startswith("DMA")
    ]
    if translated and len(survey.up) > 1:
        detail = f"{gpu_set(translated)} behind a translating IOMMU: slower peer copies and RDMA"
        advice = "kernel command line `iommu=pt` (and ACS off in the BIOS), on bare metal"
        yield Check("IOMMU", None, detail, advice)
