"""Checks this machine: what a daemon of this user needs and reports, the host, and schedulers."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import socket
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

from warpwatch import rendezvous
from warpwatch_capturing import confinement
from warpwatch_capturing.store import store_path
from warpwatch_daemon.doctor.check import BAD, NOTE, OK, Check, CheckInputs, Machine
from warpwatch_daemon.participants import stacks
from warpwatch_daemon.ranks.folder import in_use
from warpwatch_devices.attribution.kubelet import DEFAULT_SOCKET
from warpwatch_runtime.quantities import plural
from warpwatch_telemetry.errors import WarpwatchError

_LEAST_FREE_BYTES = 200 << 20


def daemon_checks(inputs: CheckInputs) -> Iterator[Check]:
    api = inputs.api
    try:
        health, ready = api.get("/healthz"), api.get("/readyz", accepted=503)
    except WarpwatchError as error:
        detail, _, advice = str(error).partition("; ")
        # A node is examined with or without a daemon; a URL is of one that should be there.
        yield Check("daemon", NOTE if inputs.here else BAD, detail, advice)
    else:
        yield Check("daemon", OK, f"version {health['version']} at {api.where}")
        for missing in ready["missing"]:
            name, _, reason = missing.partition(": ")
            yield Check(name, BAD, f"the daemon cannot read it: {reason or missing}")
    if not inputs.here:
        advice = "on its node, as its user: `warpwatch doctor` without --url and WARPWATCH_URL"
        detail = f"not examined: no daemon with a socket here is the one at {api.url}"
        yield Check("this machine", NOTE, detail, advice)


def agent_checks(inputs: CheckInputs) -> Iterator[Check]:
    config = inputs.config
    folder, inbox = in_use(config.rendezvous, os.environ, os.getuid())
    yield _platform()
    found, owner = _rendezvous(folder)
    yield found
    if owner is None or os.getuid() in (0, owner):
        yield _writable("inbox", inbox, "rendezvous.inbox")
        yield _writable("capture store", store_path(config.store), "store.url")
    else:
        detail = f"inbox and capture store are those of the daemon of uid {owner}: not examined"
        yield Check("folders", NOTE, detail, f"sudo -u '#{owner}' warpwatch doctor")
    yield trace_reader()
    if stacks.find_py_spy() is not None:
        yield Check("stacks", OK, "py-spy reads those of stopped processes, too")
    else:
        detail = "none of stopped processes, and of those that hold the GIL only what they write"
        yield Check("stacks", NOTE, detail, "install the extra warpwatch[pyspy]")


def _platform() -> Check:
    fit = sys.platform == "linux" and struct.calcsize("P") == 8 and sys.byteorder == "little"
    detail = f"{platform.system()} {platform.machine()}, Python {platform.python_version()}"
    return Check("platform", fit, detail, "" if fit else "64-bit little-endian Linux is needed")


def _rendezvous(folder: Path) -> tuple[Check, int | None]:
    """Return the finding, and the user of the daemon that holds the folder."""
    path = folder / rendezvous.LOCK_FILE
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as lock:
            owner, holder = os.fstat(lock.fileno()).st_uid, rendezvous.lock_holder(lock.fileno())
    except FileNotFoundError:
        return _writable("rendezvous", folder, "rendezvous.dir"), None
    except OSError as error:
        detail = f"{path}: {error.strerror}"
        return Check("rendezvous", BAD, detail, _elsewhere("rendezvous.dir")), None
    if holder is None:
        advice = "start one: warpwatch daemon"
        return Check("rendezvous", NOTE, f"{folder}, no daemon", advice), None
    return Check("rendezvous", OK, f"{folder}, held by pid {holder}"), owner


def trace_reader() -> Check:
    """Try the confinement as this user; the daemon's depends on its own rights."""
    try:
        missing = confinement.shortcomings()
    except OSError as error:
        missing = (f"it cannot be started: {error.strerror}",)
    if not missing:
        return Check("trace reader", OK, "who parses traces opens nothing and talks to no one")
    advice = (
        "a kernel with seccomp filters, on x86_64 or aarch64; else capture no one's but your own"
    )
    return Check("trace reader", NOTE, f"less protected: {'; '.join(missing)}", advice)


def _writable(name: str, folder: Path, key: str) -> Check:
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if not (existing.is_dir() and os.access(existing, os.W_OK)):
        detail = f"{folder}: {existing} is not a folder that uid {os.getuid()} may write"
        return Check(name, BAD, detail, f"sudo install -d -o $USER {folder}, or {_elsewhere(key)}")
    free = shutil.disk_usage(existing).free
    detail = f"{folder}, {free >> 20} MiB free"
    if free > _LEAST_FREE_BYTES:
        return Check(name, OK, detail)
    return Check(name, BAD, detail, f"free at least 200 MiB, or {_elsewhere(key)}")


def _elsewhere(key: str) -> str:
    return f"name another folder in {key}"


# Containers get the default; eight ranks with data loaders can use up the other.
_SHM_DEFAULT_BYTES = 64 << 20
_SHM_ENOUGH_BYTES = 8 << 30
_FILES_ENOUGH = 65536
_KUBELET_TIMEOUT_S = 2.0


def host_checks(inputs: CheckInputs) -> Iterator[Check]:
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
    detail = f"{plural(len(adapters), 'adapter')} ({', '.join(adapters)})"
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
    machine, setting = inputs.machine, inputs.config.attribution.kubelet_socket
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
