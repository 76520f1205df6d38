"""What attribution needs of Kubernetes and Slurm, and where this process stands."""

from __future__ import annotations

import os
import shutil
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

from warpwatch_daemon.doctor.check import Check, CheckInputs
from warpwatch_daemon.doctor.machine import Machine

_KUBELET = "/var/lib/kubelet"
_SOCKET = f"{_KUBELET}/pod-resources/kubelet.sock"
_TIMEOUT_S = 2.0


def checks(inputs: CheckInputs) -> Iterator[Check]:
    machine = inputs.machine
    yield from _kubelet(machine, inputs.config.attribution.kubelet_socket)
    yield from _slurm(machine)
    yield Check("cgroup", True, _cgroup(machine))


def _kubelet(machine: Machine, setting: str) -> Iterator[Check]:
    if setting == "off":
        yield Check("kubelet", None, "switched off (attribution.kubelet_socket)")
        return
    name = _SOCKET if setting == "auto" else setting
    path = machine.path(name)
    if not _is_socket(path):
        yield from _no_socket(machine, setting, name)
        return
    error = _refusal(path)
    if error is None:
        yield Check("kubelet", True, f"{name} answers")
        return
    denied = "run the daemon as root, or let its user read and write the socket"
    advice = denied if isinstance(error, PermissionError) else "`systemctl status kubelet`"
    yield Check("kubelet", False, f"{name}: {error.strerror or error}", advice)


def _no_socket(machine: Machine, setting: str, name: str) -> Iterator[Check]:
    in_pod = "KUBERNETES_SERVICE_HOST" in machine.environ
    if setting == "auto" and not in_pod and not machine.path(_KUBELET).exists():
        return
    detail = f"{name} is not there: no names of pods on the GPUs"
    advice = f"mount the host's {_KUBELET}/pod-resources into the daemon's pod (hostPath)"
    yield Check("kubelet", None if setting == "auto" else False, detail, advice)


def _is_socket(path: Path) -> bool:
    try:
        return stat.S_ISSOCK(path.stat().st_mode)
    except OSError:
        return False


def _refusal(path: Path) -> OSError | None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(_TIMEOUT_S)
        try:
            client.connect(str(path))
        except OSError as error:
            return error
    return None


def _slurm(machine: Machine) -> Iterator[Check]:
    job = machine.environ.get("SLURM_JOB_ID")
    if job:
        yield Check("Slurm", True, f"this shell is in job {job}")
    elif shutil.which("scontrol", path=machine.environ.get("PATH", os.defpath)):
        yield Check("Slurm", True, "scontrol is here; jobs are known by their processes' cgroups")


def _cgroup(machine: Machine) -> str:
    text = machine.text("/proc/self/cgroup") or "unknown"
    where = next((line for line in text.splitlines() if line.startswith("0::")), text)
    group = where.rpartition("::")[2].splitlines()[0]
    kind = "in a container" if machine.in_container else "on the host"
    return f"{group or '/'}, {kind}"
