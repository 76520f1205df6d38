"""The GPUs: how many there should be, each in a line, and what is wrong with any of them."""

from __future__ import annotations

from collections.abc import Iterator

import pynvml

from warpwatch_daemon.doctor.check import Check, CheckInputs, gpu_set, merged
from warpwatch_daemon.doctor.device_rules import RULES
from warpwatch_daemon.doctor.facts import DeviceFacts, Survey
from warpwatch_daemon.doctor.machine import (
    CAP_SYS_ADMIN,
    Machine,
    addresses,
    bound_addresses,
    reported_addresses,
    sysfs_bus_id,
)

_KERNEL_LOG = "`dmesg -T | grep -i -e NVRM -e Xid` says why"
# What NVML's return codes say of a whole GPU, and what helps.
_DOWN = {
    pynvml.NVML_ERROR_GPU_IS_LOST: (
        "lost: it has fallen off the bus or no longer answers",
        "drain the node, then power-cycle it (a warm reboot may not do); " + _KERNEL_LOG,
    ),
    pynvml.NVML_ERROR_RESET_REQUIRED: (
        "needs a reset before it can be used again",
        "end its processes, then `sudo nvidia-smi --gpu-reset -i {index}`; else reboot",
    ),
    pynvml.NVML_ERROR_NO_PERMISSION: (
        "this process may not use it",
        "read and write on /dev/nvidia{index} for uid {uid}; in a container the device must be "
        "in its cgroup (`--gpus`, NVIDIA_VISIBLE_DEVICES)",
    ),
    pynvml.NVML_ERROR_OPERATING_SYSTEM: (
        "the operating system (a cgroup) blocks it",
        "let the container have the device (`--gpus`, NVIDIA_VISIBLE_DEVICES), recreate it",
    ),
    pynvml.NVML_ERROR_IRQ_ISSUE: (
        "its interrupts do not arrive",
        "reboot; then BIOS settings (MSI, above 4G decoding) and the slot's power cables",
    ),
    pynvml.NVML_ERROR_DRIVER_NOT_LOADED: ("the driver was unloaded", "`sudo modprobe nvidia`"),
    pynvml.NVML_ERROR_UNINITIALIZED: ("the driver was unloaded", "`sudo modprobe nvidia`"),
    pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: (
        "library and kernel module are of different versions",
        "reboot the node, or restart the container",
    ),
    pynvml.NVML_ERROR_UNKNOWN: (
        "every call fails with Unknown Error (999)",
        _KERNEL_LOG + "; in a container: recreate it",
    ),
}
_OTHER_DRIVERS: dict[str | None, str] = {
    "vfio-pci": "nothing, if a virtual machine has it",
    "nouveau": "`echo blacklist nouveau | sudo tee /etc/modprobe.d/nouveau.conf`, renew the "
    "initramfs, install the NVIDIA driver, reboot",
}


def checks(inputs: CheckInputs) -> Iterator[Check]:
    machine, survey = inputs.machine, inputs.survey
    yield from _expected(machine, survey)
    for device in survey.devices:
        yield _up(device) if device.up else _down(device, inputs)
    for rule in RULES:
        found = ((device.index, rule.check(device)) for device in survey.up)
        yield from merged((index, check) for index, check in found if check)
    yield from _gpm_access(machine, survey)


def _expected(machine: Machine, survey: Survey) -> Iterator[Check]:
    """GPUs that the bus or the kernel module has and NVML has not."""
    for gpu in machine.pci_gpus:
        if gpu.lost:
            advice = f"reseat or replace it after a power cycle; {_KERNEL_LOG}"
            yield Check(f"PCI {gpu.bus_id}", False, "fallen off the bus (reads all ones)", advice)
    if not machine.in_container:
        yield from _other_drivers(machine, survey)
    if not survey.started:
        return
    # A device without an answer has no bus id to be known by.
    silent = sum(1 for device in survey.devices if not device.bus_id)
    known, bound = set(reported_addresses(survey).values()), bound_addresses(machine)
    missing = sorted(bound - known)
    detail = f"{len(survey.devices)} of {max(len(known | bound), len(survey.devices))} GPUs with "
    detail += "the nvidia driver"
    if len(missing) > silent and not machine.in_container:
        advice = f"{_KERNEL_LOG}; a reset or a power cycle may bring it back"
        yield Check("GPU count", False, f"{detail}; missing {', '.join(missing)}", advice)
    elif len(missing) > silent:
        # Which GPUs a container is given is its maker's choice.
        yield Check("GPU count", True, f"{detail} are in this container")
    elif bound:
        yield Check("GPU count", True, detail)


def _other_drivers(machine: Machine, survey: Survey) -> Iterator[Check]:
    """GPUs that NVML cannot see because another kernel driver has them, or none."""
    for gpu in machine.pci_gpus:
        if gpu.driver == "nvidia" or (gpu.driver is None and not survey.started):
            continue
        otherwise = f"`echo {gpu.bus_id} | sudo tee /sys/bus/pci/drivers/nvidia/bind`"
        detail = f"a GPU with the kernel driver {gpu.driver or 'none'}, hidden from NVML"
        yield Check(f"PCI {gpu.bus_id}", None, detail, _OTHER_DRIVERS.get(gpu.driver, otherwise))


def _up(device: DeviceFacts) -> Check:
    facts = [device.name or "unknown model", device.uuid or "", sysfs_bus_id(device.bus_id or "0:")]
    if device.temperature is not None:
        facts.append(f"{device.temperature} °C")
    if device.power_mw is not None:
        limit = f" of {device.power_limit_mw / 1000:.0f}" if device.power_limit_mw else ""
        facts.append(f"{device.power_mw / 1000:.0f}{limit} W")
    if device.memory is not None:
        used, total = device.memory
        facts.append(f"{used / 2**30:.1f} of {total / 2**30:.1f} GiB")
    if device.busy_percent is not None:
        facts.append(f"{device.busy_percent} % busy")
    return Check(f"GPU {device.index}", True, ", ".join(fact for fact in facts if fact))


def _down(device: DeviceFacts, inputs: CheckInputs) -> Check:
    where = addresses(inputs.machine, inputs.survey).get(device.index)
    known = [fact for fact in (device.name, device.uuid, where) if fact]
    if device.waiting_for is not None:
        what, advice = _silent(device, inputs.survey)
    else:
        code = device.down_code or pynvml.NVML_ERROR_UNKNOWN
        otherwise = (f"cannot be read: {pynvml.NVMLError(code)} ({code})", _KERNEL_LOG)
        what, advice = _DOWN.get(code, otherwise)
    advice = advice.format(index=device.index, uid=inputs.machine.uid)
    return Check(f"GPU {device.index}", False, "; ".join([what, *known]), advice)


def _silent(device: DeviceFacts, survey: Survey) -> tuple[str, str]:
    question = (device.waiting_for or "").replace("_", " ").replace("handle", "a handle")
    if survey.crashed_by is not None:
        return f"not asked to the end: the library crashed (at: {question})", _KERNEL_LOG
    return (
        f"stuck: the driver has not answered for {survey.patience_s:g} s (asked for: {question})",
        _KERNEL_LOG + "; processes in state D cannot be killed: drain the node and reboot it",
    )


def _gpm_access(machine: Machine, survey: Survey) -> Iterator[Check]:
    """Whether this user may take GPM samples, where the GPUs have GPM."""
    offered = [device for device in survey.up if device.gpm]
    if not offered:
        return
    restricted = "RmProfilingAdminOnly: 1" in (machine.text("/proc/driver/nvidia/params") or "")
    allowed = [device.index for device in offered if device.gpm_sample]
    if allowed:
        yield Check("GPM", True, f"{gpu_set(allowed)}: uid {machine.uid} may take samples")
    refused = [
        device
        for device in offered
        if device.codes.get("gpm_sample") == pynvml.NVML_ERROR_NO_PERMISSION
    ]
    if not refused:
        return
    detail = f"{gpu_set(d.index for d in refused)}: uid {machine.uid} may take no samples"
    if restricted and not machine.has_capability(CAP_SYS_ADMIN):
        detail += " (the driver reserves profiling for CAP_SYS_ADMIN)"
    advice = (
        "give the daemon CAP_SYS_ADMIN, or `options nvidia NVreg_RestrictProfilingToAdminUsers=0` "
        "in /etc/modprobe.d and reload the driver"
    )
    yield Check("GPM", None, detail, advice)
