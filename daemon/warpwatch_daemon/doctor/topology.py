"""Checks how the GPUs reach each other and the host: NVLink, fabric, PCIe paths, NUMA nodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

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
from warpwatch_devices.nvml.facts import PCI_DEVICES
from warpwatch_devices.nvml.survey import GpuReading, Survey

# NVML_TOPOLOGY_* in words, with the abbreviation of `nvidia-smi topo -m`.
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
# Shifts in the health mask; the two bits are 1 if it is so.
_FABRIC_TROUBLES = {
    pynvml.NVML_GPU_FABRIC_HEALTH_MASK_SHIFT_DEGRADED_BW: "bandwidth is degraded",
    pynvml.NVML_GPU_FABRIC_HEALTH_MASK_SHIFT_ROUTE_RECOVERY: "routes are being recovered",
    pynvml.NVML_GPU_FABRIC_HEALTH_MASK_SHIFT_ROUTE_UNHEALTHY: "a route is unhealthy",
    pynvml.NVML_GPU_FABRIC_HEALTH_MASK_SHIFT_ACCESS_TIMEOUT_RECOVERY: "accesses timed out",
}
_MAX_PAIRS = 6
_MANAGER = (
    "`systemctl status nvidia-fabricmanager`: it must run, in the driver's very version; then "
    "restart it and the GPU's users (`nvidia-smi -q | grep -A4 Fabric`)"
)


def checks(inputs: CheckInputs) -> Iterator[Check]:
    machine, survey = inputs.machine, inputs.survey
    # The largest number of active links by model.
    best: Counter[str] = Counter()
    for gpu in survey.up:
        best[gpu.name] = max(best[gpu.name], sum(gpu.links.values()))
    yield from merged((gpu.index, _nvlink(gpu, best[gpu.name])) for gpu in survey.up)
    yield from merged((gpu.index, _fabric(gpu)) for gpu in survey.up)
    yield from _paths(survey)
    yield from _peer_access(survey)
    yield from _numa(machine, survey)
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


def _paths(survey: Survey) -> Iterator[Check]:
    """Yield all pairs, grouped by how they reach each other."""
    up = {gpu.index: gpu for gpu in survey.up}
    kinds: dict[str, list[str]] = {}
    for pair in sorted(survey.pairs, key=lambda pair: pair.gpus):
        first, second = pair.gpus
        if first in up and second in up and pair.ancestor is not None:
            path = _PATHS.get(pair.ancestor, f"level {pair.ancestor}")
            kind = up[first].joined(up[second]) or path
            kinds.setdefault(kind, []).append(f"{first}-{second}")
    if len(kinds) == 1:
        ((kind, pairs),) = kinds.items()
        which = f"all {len(pairs)}" if len(pairs) > 1 else pairs[0]
        yield Check("GPU pairs", OK, f"{which} through {kind}")
    elif kinds:
        shown = (f"{kind}: {listed(pairs, _MAX_PAIRS)}" for kind, pairs in kinds.items())
        yield Check("GPU pairs", OK, "; ".join(shown))


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


def _numa(machine: Machine, survey: Survey) -> Iterator[Check]:
    nodes: dict[int, list[int]] = {}
    for gpu in survey.up:
        node = machine.text(f"{PCI_DEVICES}/{gpu.address}/numa_node") if gpu.address else None
        # -1: the machine has no such nodes.
        if node and node.isdigit():
            nodes.setdefault(int(node), []).append(gpu.index)
    placed = []
    for number, gpus in sorted(nodes.items()):
        cpus = machine.text(f"/sys/devices/system/node/node{number}/cpulist") or "?"
        placed.append(f"{gpu_set(gpus)} on node {number} (CPUs {cpus})")
    if len(nodes) == 1:
        yield Check("NUMA", OK, placed[0])
    elif nodes:
        advice = "bind each rank and its data loaders to its GPU's node: `numactl --cpunodebind=N`"
        yield Check("NUMA", NOTE, "; ".join(placed), advice)


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
