"""Checks the host: shared memory, pressure figures, limits, InfiniBand, kubelet, Slurm, cgroup."""

from __future__ import annotations

import os
import resource
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

from warpwatch_daemon.doctor.check import BAD, NOTE, OK, Check, CheckInputs, Machine
from warpwatch_devices.attribution.kubelet import DEFAULT_SOCKET

# Containers get the default; eight ranks with data loaders can use up the other.
_SHM_DEFAULT_BYTES = 64 << 20
_SHM_ENOUGH_BYTES = 8 << 30
_FILES_ENOUGH = 65536
_KUBELET_TIMEOUT_S = 2.0


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
        yield Check("/dev/shm", BAD, detail, advice)
    elif free < _SHM_ENOUGH_BYTES:
        yield Check("/dev/shm", NOTE, f"{detail}: little for many data loaders", advice)
    else:
        yield Check("/dev/shm", OK, detail)


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count >> 20} MiB"


def _pressure(machine: Machine) -> Check:
    if machine.text("/proc/pressure/cpu") is not None:
        return Check("pressure (PSI)", OK, "available")
    detail = "no /proc/pressure: starving for CPU, disk or memory is not measured"
    return Check("pressure (PSI)", NOTE, detail, "kernel command line `psi=1`")


def _open_files() -> Check:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    is_unlimited = hard == resource.RLIM_INFINITY
    detail = f"{soft} (hard {'unlimited' if is_unlimited else hard}) for this shell"
    if soft >= (_FILES_ENOUGH if is_unlimited else min(_FILES_ENOUGH, hard)):
        return Check("open files", OK, detail)
    advice = "`ulimit -n 65536` before training: many data loaders and ranks use many files"
    return Check("open files", NOTE, detail, advice)


def _infiniband(machine: Machine) -> Iterator[Check]:
    adapters = machine.names("/sys/class/infiniband")
    if not adapters:
        return
    yield _ports(machine, adapters)
    yield _gpu_direct(machine)
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        yield Check("locked memory", OK, "unlimited")
        return
    detail = f"{soft >> 10} KiB for this shell: RDMA must lock more"
    advice = "`ulimit -l unlimited`; container: `--ulimit memlock=-1`; systemd: LimitMEMLOCK="
    yield Check("locked memory", NOTE, detail, advice)


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
        return Check("InfiniBand", OK, f"{detail}, all ports active")
    advice = "`ibstat`; cable, switch port and subnet manager, if that port is in use"
    return Check("InfiniBand", NOTE, f"{detail}; not active: {', '.join(down)}", advice)


def _gpu_direct(machine: Machine) -> Check:
    modules = {line.split()[0] for line in (machine.text("/proc/modules") or "").splitlines()}
    if {"nvidia_peermem", "nv_peer_mem"} & modules:
        loaded = sorted(modules & {"nvidia_peermem", "nv_peer_mem", "gdrdrv"})
        return Check("GPUDirect RDMA", OK, f"loaded: {', '.join(loaded)}")
    detail = "nvidia_peermem is not loaded: RDMA of GPU memory needs it, or DMA-BUF (open kernel "
    detail += "modules, Linux 5.12)"
    advice = "`sudo modprobe nvidia_peermem`, unless NCCL's log says `DMA-BUF is available`"
    return Check("GPUDirect RDMA", NOTE, detail, advice)


def scheduler_checks(inputs: CheckInputs) -> Iterator[Check]:
    machine = inputs.machine
    yield from _kubelet(machine, inputs.config.attribution.kubelet_socket)
    job = machine.environ.get("SLURM_JOB_ID")
    if job:
        yield Check("Slurm", OK, f"this shell is in job {job}")
    elif shutil.which("scontrol", path=machine.environ.get("PATH", os.defpath)):
        yield Check("Slurm", OK, "scontrol is here; jobs are known by their processes' cgroups")
    text = machine.text("/proc/self/cgroup") or "unknown"
    line = next((line for line in text.splitlines() if line.startswith("0::")), text)
    group = line.rpartition("::")[2].splitlines()[0]
    kind = "in a container" if machine.in_container else "on the host"
    yield Check("cgroup", OK, f"{group or '/'}, {kind}")


def _kubelet(machine: Machine, setting: str) -> Iterator[Check]:
    if setting == "off":
        yield Check("kubelet", NOTE, "switched off (attribution.kubelet_socket)")
        return
    name = str(DEFAULT_SOCKET) if setting == "auto" else setting
    path = machine.path(name)
    if path.is_socket():
        yield _kubelet_answer(name, path)
        return
    kubelet = DEFAULT_SOCKET.parents[1]
    is_node = "KUBERNETES_SERVICE_HOST" in machine.environ or machine.path(kubelet).exists()
    if setting != "auto" or is_node:
        detail = f"{name} is not there: no names of pods on the GPUs"
        advice = f"mount the host's {DEFAULT_SOCKET.parent} into the daemon's pod (hostPath)"
        yield Check("kubelet", NOTE if setting == "auto" else BAD, detail, advice)


def _kubelet_answer(name: str, path: Path) -> Check:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(_KUBELET_TIMEOUT_S)
        try:
            client.connect(str(path))
        except OSError as error:
            denied = "run the daemon as root, or let its user read and write the socket"
            is_denied = isinstance(error, PermissionError)
            advice = denied if is_denied else "`systemctl status kubelet`"
            return Check("kubelet", BAD, f"{name}: {error.strerror or error}", advice)
    return Check("kubelet", OK, f"{name} answers")
