"""The node beside its GPUs: shared memory, pressure figures, limits, InfiniBand."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator

from warpwatch_daemon.doctor.check import Check, CheckInputs
from warpwatch_daemon.doctor.machine import Machine

# What containers get by default, and what eight ranks with data loaders can use up.
_SHM_DEFAULT_BYTES = 64 << 20
_SHM_ENOUGH_BYTES = 8 << 30
_FILES_ENOUGH = 65536


def checks(inputs: CheckInputs) -> Iterator[Check]:
    machine = inputs.machine
    yield from _shared_memory(machine)
    yield _pressure(machine)
    yield _open_files()
    yield from _infiniband(machine)


def _shared_memory(machine: Machine) -> Iterator[Check]:
    try:
        status = os.statvfs(machine.path("/dev/shm"))
    except OSError:
        return
    total, free = status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize
    detail = f"{_size(total)}, {_size(free)} free"
    advice = "`docker run --shm-size=16g` or `--ipc=host`; pod: emptyDir medium Memory at /dev/shm"
    if total <= _SHM_DEFAULT_BYTES or free < _SHM_DEFAULT_BYTES:
        detail += ": data loaders and NCCL die of bus errors"
        yield Check("/dev/shm", False, detail, advice)
    elif free < _SHM_ENOUGH_BYTES:
        yield Check("/dev/shm", None, f"{detail}: little for many data loaders", advice)
    else:
        yield Check("/dev/shm", True, detail)


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count >> 20} MiB"


def _pressure(machine: Machine) -> Check:
    if machine.text("/proc/pressure/cpu") is not None:
        return Check("pressure (PSI)", True, "available")
    detail = "no /proc/pressure: starving for CPU, disk or memory is not measured"
    return Check("pressure (PSI)", None, detail, "kernel command line `psi=1`")


def _open_files() -> Check:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    detail = f"{soft} (hard {_limit(hard)}) for this shell"
    if soft >= min(_FILES_ENOUGH, hard if hard > 0 else _FILES_ENOUGH):
        return Check("open files", True, detail)
    advice = "`ulimit -n 65536` before training: many data loaders and ranks use many files"
    return Check("open files", None, detail, advice)


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value)


def _infiniband(machine: Machine) -> Iterator[Check]:
    adapters = machine.names("/sys/class/infiniband")
    if not adapters:
        return
    yield _ports(machine, adapters)
    yield _gpu_direct(machine)
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        yield Check("locked memory", True, "unlimited")
        return
    detail = f"{soft >> 10} KiB for this shell: RDMA must lock more"
    advice = "`ulimit -l unlimited`; container: `--ulimit memlock=-1`; systemd: LimitMEMLOCK="
    yield Check("locked memory", None, detail, advice)


def _ports(machine: Machine, adapters: list[str]) -> Check:
    down = []
    for adapter in adapters:
        folder = f"/sys/class/infiniband/{adapter}/ports"
        for port in machine.names(folder):
            state = machine.text(f"{folder}/{port}/state") or "unknown"
            if "ACTIVE" not in state:
                down.append(f"{adapter}:{port} {state.rpartition(': ')[2].lower()}")
    detail = f"{len(adapters)} adapters ({', '.join(adapters)})"
    if not down:
        return Check("InfiniBand", True, f"{detail}, all ports active")
    advice = "`ibstat`; cable, switch port and subnet manager, if that port is in use"
    return Check("InfiniBand", None, f"{detail}; not active: {', '.join(down)}", advice)


def _gpu_direct(machine: Machine) -> Check:
    loaded = machine.modules() & {"nvidia_peermem", "nv_peer_mem", "gdrdrv"}
    if {"nvidia_peermem", "nv_peer_mem"} & loaded:
        return Check("GPUDirect RDMA", True, f"loaded: {', '.join(sorted(loaded))}")
    detail = "nvidia_peermem is not loaded: RDMA of GPU memory needs it, or DMA-BUF (open kernel "
    detail += "modules, Linux 5.12)"
    advice = "`sudo modprobe nvidia_peermem`, unless NCCL's log says `DMA-BUF is available`"
    return Check("GPUDirect RDMA", None, detail, advice)
