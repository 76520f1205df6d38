"""Checks the driver: library, kernel module, device files, and the limits of a container."""

from __future__ import annotations

import errno
import os
import re
import signal
import sys
from collections.abc import Iterator

import pynvml

from warpwatch_daemon.doctor.check import BAD, NOTE, OK, Check, CheckInputs, Machine
from warpwatch_devices.nvml.survey import COMMAND, Survey
from warpwatch_runtime.quantities import plural

_CONTROL_DEVICE = "/dev/nvidiactl"
_UNIFIED_MEMORY = "/dev/nvidia-uvm"
_MIG_MONITOR = "/dev/nvidia-caps/nvidia-cap2"
_MAKE_DEVICES = "`sudo nvidia-modprobe -u -c 0`"
_RECREATE = (
    "recreate the container (the device rights of its cgroup are gone, as `systemctl "
    "daemon-reload` on the host does); to prevent it, on the host: `sudo nvidia-ctk system "
    "create-dev-char-symlinks --create-all`"
)
_NO_SERVICE = "device files and module: `ls -l /dev/nvidia*`, `dmesg -T | grep -i NVRM`"
_OTHER_VERSION = (
    "the driver was updated under a loaded module: reboot, or stop all GPU users and `sudo rmmod "
    "nvidia_uvm nvidia_drm nvidia_modeset nvidia && sudo modprobe nvidia`; a container: restart it"
)
_NO_RIGHTS = (
    "give this user read and write on /dev/nvidia*: `sudo usermod -aG video $USER`, or the device "
    "in the container's cgroup"
)
_START_ADVICE = {
    pynvml.NVML_ERROR_DRIVER_NOT_LOADED: "`sudo modprobe nvidia`; if that fails: `dkms status`, "
    "`dmesg -T | grep -i NVRM` (unsigned module under Secure Boot? kernel updated?)",
    pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: _OTHER_VERSION,
    pynvml.NVML_ERROR_NO_PERMISSION: _NO_RIGHTS,
}
_CONTAINER_ADVICE = (
    "start the container with the NVIDIA runtime: `docker run --gpus all`, or a pod with "
    "`nvidia.com/gpu` or runtimeClassName nvidia, NVIDIA_VISIBLE_DEVICES=all and "
    "NVIDIA_DRIVER_CAPABILITIES=utility"
)


def checks(inputs: CheckInputs) -> Iterator[Check]:
    machine, survey = inputs.machine, inputs.survey
    if not survey.asked:
        yield Check("NVML", NOTE, "switched off (sources.nvml.enabled)")
        return
    detail, advice = _nvml(machine, survey)
    yield Check("NVML", not advice, detail, advice)
    module, library = _module_version(machine), _version_in(r"\.so\.", survey.library)
    library = library or survey.driver_version
    if module and library:
        detail = ", as the library" if module == library else f", but the library is {library}"
        advice = "" if module == library else _OTHER_VERSION
        yield Check("kernel module", module == library, f"{module}{detail}", advice)
    yield from _device_files(machine, survey)
    yield from _container(machine, survey)


def _nvml(machine: Machine, survey: Survey) -> tuple[str, str]:
    """Return detail and advice; NVML works if there is no advice."""
    library = survey.library or "library unknown"
    if survey.crashed_by is not None:
        crash = signal.Signals(survey.crashed_by).name
        detail = f"the library crashed while it was asked ({crash})"
        return detail, "install another driver release; then report the crash"
    if survey.failure:
        detail = f"it was not asked: the survey ended with {survey.failure}"
        return detail, f"`{sys.executable} {' '.join(COMMAND)}` shows why"
    if survey.code is None or (survey.started and survey.count is survey.count_code is None):
        detail = f"the driver has not answered for {survey.patience_s:g} s: the kernel module hangs"
        return detail, "`dmesg -T | grep -i -e NVRM -e Xid`; reboot the node"
    if not survey.started:
        return _not_started(machine, survey)
    # A container that has lost its devices answers every call so.
    codes = {survey.count_code, *(gpu.code for gpu in survey.gpus)} - {None}
    if codes == {pynvml.NVML_ERROR_UNKNOWN} and not survey.up:
        detail = f"every call says Unknown Error (999); {library}"
        return detail, _RECREATE if machine.in_container else _NO_SERVICE
    cuda = survey.cuda_version or 0
    supported = f", CUDA up to {cuda // 1000}.{cuda % 1000 // 10}" if cuda else ""
    versions = f"driver {survey.driver_version}, NVML {survey.nvml_version}{supported}; {library}"
    if survey.gpus:
        return f"{plural(len(survey.gpus), 'GPU')}, {versions}", ""
    on_bus = "`lspci -d 10de:` shows what the bus has; `dmesg -T | grep -i NVRM` why none came up"
    advice = _CONTAINER_ADVICE if machine.in_container else on_bus
    return f"the driver shows no GPU; {versions}", advice


def _not_started(machine: Machine, survey: Survey) -> tuple[str, str]:
    if survey.code != pynvml.NVML_ERROR_LIBRARY_NOT_FOUND:
        otherwise = _NO_SERVICE
        if survey.code == pynvml.NVML_ERROR_UNKNOWN and machine.in_container:
            otherwise = _RECREATE
        return f"{survey.error} ({survey.code})", _START_ADVICE.get(survey.code or 0, otherwise)
    missing, module = "libnvidia-ml.so.1 not found", _module_version(machine)
    if not machine.pci_gpus and not module:
        return (
            f"{missing}; no NVIDIA GPU on the PCI bus, no kernel module",
            "without a GPU: sources.nvml.enabled: false (WARPWATCH_SOURCES__NVML__ENABLED=false), "
            "or see `warpwatch demo`",
        )
    gpus = f"{plural(len(machine.pci_gpus), 'GPU')} on the PCI bus"
    if machine.in_container:
        return f"{missing} in this container; {gpus}", _CONTAINER_ADVICE
    if module:
        detail = f"{missing} although the kernel module {module} is loaded"
        return detail, "install the driver's libraries (package libnvidia-compute or nvidia-utils)"
    return f"{missing}; {gpus}, no kernel module", "install the NVIDIA driver and reboot"


def _module_version(machine: Machine) -> str | None:
    return _version_in(r"Kernel Module\b.*?", machine.text("/proc/driver/nvidia/version"))


def _version_in(prefix: str, text: str | None) -> str | None:
    match = re.search(prefix + r"(\d+\.\d+(?:\.\d+)?)", text or "")
    return match[1] if match else None


def _device_files(machine: Machine, survey: Survey) -> Iterator[Check]:
    present = [f"/dev/{n}" for n in machine.names("/dev") if re.fullmatch(r"nvidia\d+", n)]
    if not machine.path(_CONTROL_DEVICE).exists():
        if _module_version(machine) or present:
            advice = _CONTAINER_ADVICE if machine.in_container else _MAKE_DEVICES
            yield Check("device files", BAD, f"{_CONTROL_DEVICE} is missing", advice)
        return
    refused = None
    try:
        # This wakes no GPU.
        os.close(os.open(machine.path(_CONTROL_DEVICE), os.O_RDWR | os.O_CLOEXEC))
    except OSError as error:
        refused = error.errno
    closed = [
        name
        for name in (_CONTROL_DEVICE, *present)
        if not os.access(machine.path(name), os.R_OK | os.W_OK)
    ]
    if refused == errno.EPERM:
        detail = f"{_CONTROL_DEVICE}: the cgroup forbids the device"
        yield Check("device files", BAD, detail, _RECREATE)
    elif closed or refused:
        detail = f"uid {machine.uid} may not open {', '.join(closed or [_CONTROL_DEVICE])}"
        yield Check("device files", BAD, detail, _NO_RIGHTS)
    else:
        yield Check("device files", OK, f"{_CONTROL_DEVICE} and {len(present)} GPUs can be opened")
        if not machine.path(_UNIFIED_MEMORY).exists():
            detail = f"{_UNIFIED_MEMORY} is missing: NVML works, CUDA programs fail here"
            yield Check("CUDA", NOTE, detail, f"{_MAKE_DEVICES}, if CUDA is wanted")
        # Without the right to monitor, MIG shows only the instances that this user may use.
        if any(gpu.value("mig_mode") for gpu in survey.gpus):
            yield _mig_monitor(machine)


def _mig_monitor(machine: Machine) -> Check:
    if os.access(machine.path(_MIG_MONITOR), os.R_OK):
        return Check("MIG monitor", OK, f"{_MIG_MONITOR} can be read")
    detail = f"{_MIG_MONITOR} cannot be read: instances of others stay hidden"
    if machine.in_container:
        advice = "NVIDIA_MIG_MONITOR_DEVICES=all and CAP_SYS_ADMIN for the container"
    else:
        advice = "`sudo nvidia-modprobe -f /proc/driver/nvidia/capabilities/mig/monitor`, and "
        advice += f"read permission on {_MIG_MONITOR}"
    return Check("MIG monitor", NOTE, detail, advice)


def _container(machine: Machine, survey: Survey) -> Iterator[Check]:
    names = ("NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES")
    devices, capabilities = given = [machine.environ.get(name) for name in names]
    is_unset = given == [None, None]
    if is_unset and (survey.started or not machine.in_container or not machine.pci_gpus):
        return
    shown = ("(not set)" if value is None else value[:60] or "(empty)" for value in given)
    detail = ", ".join(f"{name}={value}" for name, value in zip(names, shown, strict=True))
    fault = NOTE if survey.started else BAD
    if devices in ("", "none", "void"):
        yield Check("container", fault, detail, "NVIDIA_VISIBLE_DEVICES=all lets the GPUs in")
    elif capabilities and not {"utility", "all"} & set(capabilities.split(",")):
        advice = "add `utility` to NVIDIA_DRIVER_CAPABILITIES: NVML comes with it"
        yield Check("container", fault, detail, advice)
    elif is_unset:
        yield Check("container", NOTE, detail, _CONTAINER_ADVICE)
    else:
        yield Check("container", OK, detail)
