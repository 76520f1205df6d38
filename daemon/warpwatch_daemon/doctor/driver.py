"""The driver: library, kernel module, device files, and what a container lets through."""

from __future__ import annotations

import errno
import os
import re
import signal
from collections.abc import Iterator

import pynvml

from warpwatch_daemon.doctor.check import Check, CheckInputs
from warpwatch_daemon.doctor.facts import Survey
from warpwatch_daemon.doctor.machine import Machine
from warpwatch_runtime.quantities import plural

_CONTROL_DEVICE = "/dev/nvidiactl"
_UNIFIED_MEMORY = "/dev/nvidia-uvm"
_MIG_MONITOR = "/dev/nvidia-caps/nvidia-cap2"
_RECREATE = (
    "recreate the container (the device rights of its cgroup are gone, as `systemctl "
    "daemon-reload` on the host does); to prevent it, on the host: `sudo nvidia-ctk system "
    "create-dev-char-symlinks --create-all`"
)
_NO_SERVICE = "device files and module: `ls -l /dev/nvidia*`, `dmesg -T | grep -i NVRM`"
_ADVICE = {
    pynvml.NVML_ERROR_DRIVER_NOT_LOADED: "`sudo modprobe nvidia`; if that fails: `dkms status`, "
    "`dmesg -T | grep -i NVRM` (unsigned module under Secure Boot? kernel updated?)",
    pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: "the driver was updated under a loaded module: "
    "reboot, or stop all GPU users and `sudo rmmod nvidia_uvm nvidia_drm nvidia_modeset nvidia && "
    "sudo modprobe nvidia`; a container: restart it",
    pynvml.NVML_ERROR_NO_PERMISSION: "give this user read and write on /dev/nvidia*: "
    "`sudo usermod -aG video $USER`, or the device in the container's cgroup",
    pynvml.NVML_ERROR_UNKNOWN: _NO_SERVICE,
}
_CONTAINER_ADVICE = (
    "start the container with the NVIDIA runtime: `docker run --gpus all`, or a pod with "
    "`nvidia.com/gpu` or runtimeClassName nvidia, NVIDIA_VISIBLE_DEVICES=all and "
    "NVIDIA_DRIVER_CAPABILITIES=utility"
)


def checks(inputs: CheckInputs) -> Iterator[Check]:
    machine, survey = inputs.machine, inputs.survey
    if not survey.asked:
        yield Check("NVML", None, "switched off (sources.nvml.enabled)")
        return
    yield _nvml(machine, survey)
    yield from _kernel_module(machine, survey)
    yield from _device_files(machine, survey)
    yield from _container(machine, survey)


def _nvml(machine: Machine, survey: Survey) -> Check:
    if survey.crashed_by is not None:
        crash = signal.Signals(survey.crashed_by).name
        detail = f"the library crashed while it was asked ({crash})"
        return Check("NVML", False, detail, "install another driver release; then report the crash")
    if survey.code is None or (survey.started and survey.count is survey.count_code is None):
        detail = f"the driver has not answered for {survey.patience_s:g} s: the kernel module hangs"
        return Check("NVML", False, detail, "`dmesg -T | grep -i -e NVRM -e Xid`; reboot the node")
    if not survey.started:
        return Check("NVML", False, *_not_started(machine, survey))
    if _all_unknown(survey):
        detail = f"every call says Unknown Error (999); {survey.library or 'library unknown'}"
        return Check("NVML", False, detail, _RECREATE if machine.in_container else _NO_SERVICE)
    detail = f"{_versions(survey)}; {survey.library or 'library unknown'}"
    if not survey.devices:
        advice = _no_gpu_advice(machine)
        return Check("NVML", False, f"the driver shows no GPU; {detail}", advice)
    return Check("NVML", True, f"{plural(len(survey.devices), 'GPU')}, {detail}")


def _all_unknown(survey: Survey) -> bool:
    """The sign of a container that has lost its devices: everything is unknown."""
    codes = {survey.count_code, *(device.down_code for device in survey.devices)}
    return codes - {None} == {pynvml.NVML_ERROR_UNKNOWN} and not survey.up


def _versions(survey: Survey) -> str:
    cuda = survey.cuda_version or 0
    supported = f", CUDA up to {cuda // 1000}.{cuda % 1000 // 10}" if cuda else ""
    return f"driver {survey.driver_version}, NVML {survey.nvml_version}{supported}"


def _not_started(machine: Machine, survey: Survey) -> tuple[str, str]:
    if survey.code == pynvml.NVML_ERROR_LIBRARY_NOT_FOUND:
        return _no_library(machine, survey)
    assert survey.code is not None
    detail = f"{survey.error} ({survey.code})"
    if survey.code == pynvml.NVML_ERROR_UNKNOWN and machine.in_container:
        return detail, _RECREATE
    return detail, _ADVICE.get(survey.code, _NO_SERVICE)


def _no_library(machine: Machine, survey: Survey) -> tuple[str, str]:
    missing = "libnvidia-ml.so.1 not found"
    if not machine.pci_gpus and not _module_version(machine):
        return (
            f"{missing}; no NVIDIA GPU on the PCI bus, no kernel module",
            "without a GPU: sources.nvml.enabled: false (WARPWATCH_SOURCES__NVML__ENABLED=false), "
            "or see `warpwatch demo`",
        )
    gpus = f"{plural(len(machine.pci_gpus), 'GPU')} on the PCI bus"
    if machine.in_container:
        return f"{missing} in this container; {gpus}", _CONTAINER_ADVICE
    if _module_version(machine):
        detail = f"{missing} although the kernel module {_module_version(machine)} is loaded"
        return detail, "install the driver's libraries (package libnvidia-compute or nvidia-utils)"
    return f"{missing}; {gpus}, no kernel module", "install the NVIDIA driver and reboot"


def _no_gpu_advice(machine: Machine) -> str:
    if machine.in_container:
        return _CONTAINER_ADVICE
    return "`lspci -d 10de:` shows what the bus has; `dmesg -T | grep -i NVRM` why none came up"


def _module_version(machine: Machine) -> str | None:
    text = machine.text("/proc/driver/nvidia/version") or ""
    match = re.search(r"Kernel Module\b.*?(\d+\.\d+(?:\.\d+)?)", text)
    return match[1] if match else None


def _library_version(survey: Survey) -> str | None:
    match = re.search(r"\.so\.(\d+\.\d+(?:\.\d+)?)", survey.library or "")
    return match[1] if match else None


def _kernel_module(machine: Machine, survey: Survey) -> Iterator[Check]:
    module = _module_version(machine)
    library = _library_version(survey) or survey.driver_version
    if module is None or library is None:
        return
    if module == library:
        yield Check("kernel module", True, f"{module}, as the library")
        return
    advice = _ADVICE[pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH]
    yield Check("kernel module", False, f"{module}, but the library is {library}", advice)


def _device_files(machine: Machine, survey: Survey) -> Iterator[Check]:
    present = [f"/dev/{n}" for n in machine.names("/dev") if re.fullmatch(r"nvidia\d+", n)]
    if not machine.path(_CONTROL_DEVICE).exists():
        if _module_version(machine) or present:
            advice = _CONTAINER_ADVICE if machine.in_container else "`sudo nvidia-modprobe -u -c 0`"
            yield Check("device files", False, f"{_CONTROL_DEVICE} is missing", advice)
        return
    refused = _refusal(machine)
    if refused == errno.EPERM:
        detail = f"{_CONTROL_DEVICE}: the cgroup forbids the device"
        yield Check("device files", False, detail, _RECREATE)
        return
    closed = [name for name in (_CONTROL_DEVICE, *present) if not _accessible(machine, name)]
    if closed or refused:
        detail = f"uid {machine.uid} may not open {', '.join(closed or [_CONTROL_DEVICE])}"
        advice = _ADVICE[pynvml.NVML_ERROR_NO_PERMISSION]
        yield Check("device files", False, detail, advice)
        return
    yield Check("device files", True, f"{_CONTROL_DEVICE} and {len(present)} GPUs can be opened")
    if not machine.path(_UNIFIED_MEMORY).exists():
        detail = f"{_UNIFIED_MEMORY} is missing: NVML works, CUDA programs fail here"
        yield Check("CUDA", None, detail, "`sudo nvidia-modprobe -u -c 0`, if CUDA is wanted")
    yield from _mig_monitor(machine, survey)


def _refusal(machine: Machine) -> int | None:
    """The errno with which the control device cannot be opened; opening it wakes no GPU."""
    try:
        os.close(os.open(machine.path(_CONTROL_DEVICE), os.O_RDWR | os.O_CLOEXEC))
    except OSError as error:
        return error.errno
    return None


def _accessible(machine: Machine, name: str) -> bool:
    return os.access(machine.path(name), os.R_OK | os.W_OK)


def _mig_monitor(machine: Machine, survey: Survey) -> Iterator[Check]:
    """Without the right to monitor, MIG shows only the instances that one may use."""
    if not any(device.mig_mode and device.mig_mode.current for device in survey.devices):
        return
    if os.access(machine.path(_MIG_MONITOR), os.R_OK):
        yield Check("MIG monitor", True, f"{_MIG_MONITOR} can be read")
        return
    advice = (
        "NVIDIA_MIG_MONITOR_DEVICES=all and CAP_SYS_ADMIN for the container"
        if machine.in_container
        else f"`sudo nvidia-modprobe -f /proc/driver/nvidia/capabilities/mig/monitor`, and read "
        f"permission on {_MIG_MONITOR}"
    )
    detail = f"{_MIG_MONITOR} cannot be read: instances of others stay hidden"
    yield Check("MIG monitor", None, detail, advice)


def _container(machine: Machine, survey: Survey) -> Iterator[Check]:
    devices = machine.environ.get("NVIDIA_VISIBLE_DEVICES")
    capabilities = machine.environ.get("NVIDIA_DRIVER_CAPABILITIES")
    unset = devices is None and capabilities is None
    if unset and (survey.started or not machine.in_container or not machine.pci_gpus):
        return
    detail = f"NVIDIA_VISIBLE_DEVICES={_shown(devices)}, "
    detail += f"NVIDIA_DRIVER_CAPABILITIES={_shown(capabilities)}"
    fault = None if survey.started else False
    if devices in ("", "none", "void"):
        yield Check("container", fault, detail, "NVIDIA_VISIBLE_DEVICES=all lets the GPUs in")
    elif capabilities and not {"utility", "all"} & set(capabilities.split(",")):
        advice = "add `utility` to NVIDIA_DRIVER_CAPABILITIES: NVML comes with it"
        yield Check("container", fault, detail, advice)
    elif unset:
        yield Check("container", None, detail, _CONTAINER_ADVICE)
    else:
        yield Check("container", True, detail)


def _shown(value: str | None) -> str:
    return "(not set)" if value is None else value[:60] or "(empty)"
