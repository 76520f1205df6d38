"""Rules on one GPU's settings, and on what its model and this user's rights allow."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pynvml

from warpwatch_daemon.doctor.check import Check, gpu_set
from warpwatch_daemon.doctor.facts import DeviceFacts, Modes, Survey
from warpwatch_daemon.doctor.machine import CAP_SYS_ADMIN, Machine

_DESKTOP_NAMES = ("GeForce", "RTX", "Quadro", "TITAN", "NVS", "T400", "T600", "T1000")
_OFFERS = {
    "temperature_margin": "temperature margin",
    "power_mw": "power",
    "busy_percent": "utilization",
    "ecc_mode": "ECC",
    "remapped_rows": "row remapping",
    "recovery_action": "recovery advice",
    "mig_mode": "MIG",
    "nvlinks": "NVLink",
    "fabric": "NVLink fabric",
}
_COMPUTE_MODES = {
    pynvml.NVML_COMPUTEMODE_PROHIBITED: (False, "prohibited: no CUDA program can run"),
    pynvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS: (None, "exclusive: one process a GPU"),
    pynvml.NVML_COMPUTEMODE_EXCLUSIVE_THREAD: (None, "exclusive: one thread a GPU"),
}


def persistence_mode(device: DeviceFacts) -> Check | None:
    if device.persistence_mode is None:
        return None
    if device.persistence_mode:
        return Check("persistence", True, "on")
    detail = "off: the GPU is initialised again whenever no process has it open (slow first call, "
    detail += "clocks and limits forgotten)"
    advice = "`sudo systemctl enable --now nvidia-persistenced`, or `sudo nvidia-smi -pm 1`"
    return Check("persistence", None, detail, advice)


def _pending(name: str, modes: Modes) -> Check:
    detail = f"{_on(modes.current)}, will be {_on(modes.pending)} after a reset"
    advice = "`sudo nvidia-smi --gpu-reset -i {gpus}` once idle, or reboot"
    return Check(name, None, detail, advice)


def ecc_mode(device: DeviceFacts) -> Check | None:
    modes = device.ecc_mode
    if modes is None:
        return None
    if modes.current != modes.pending:
        return _pending("ECC", modes)
    if modes.current:
        return Check("ECC", True, "on")
    if any(name in (device.name or "") for name in _DESKTOP_NAMES):
        return Check("ECC", True, "off, as desktop GPUs are delivered")
    advice = "`sudo nvidia-smi -i {gpus} -e 1`, then a reset"
    return Check("ECC", False, "off: memory errors corrupt results unseen", advice)


def compute_mode(device: DeviceFacts) -> Check | None:
    if device.compute_mode is None:
        return None
    if device.compute_mode not in _COMPUTE_MODES:
        return Check("compute mode", True, "default")
    ok, detail = _COMPUTE_MODES[device.compute_mode]
    advice = "`sudo nvidia-smi -i {gpus} -c DEFAULT`"
    if ok is None:
        advice += " if several processes shall share it"
    return Check("compute mode", ok, detail, advice)


def power_limit(device: DeviceFacts) -> Check | None:
    limit, default = device.power_limit_mw, device.default_power_limit_mw
    if not limit or not default:
        return None
    if limit >= default:
        return Check("power limit", True, f"{limit / 1000:.0f} W")
    detail = f"{limit / 1000:.0f} W, {default / 1000:.0f} W by default: slower under full load"
    advice = f"`sudo nvidia-smi -i {{gpus}} -pl {default / 1000:.0f}` unless it is meant so"
    return Check("power limit", None, detail, advice)


def mig_mode(device: DeviceFacts) -> Check | None:
    modes = device.mig_mode
    if modes is None:
        return None
    if modes.current != modes.pending:
        return _pending("MIG", modes)
    if not modes.current:
        return Check("MIG", True, "off")
    if not device.mig_instances:
        advice = (
            "`sudo nvidia-smi mig -i {gpus} -cgi PROFILE -C` (profiles: `nvidia-smi mig -lgip`)"
        )
        return Check("MIG", None, "on, but no instance: nothing can run", advice)
    kinds = Counter(_profile(name) for name in device.mig_instances)
    listed = ", ".join(f"{count} x {name}" for name, count in kinds.items())
    return Check("MIG", True, f"on, {listed}")


def _profile(name: str) -> str:
    """``NVIDIA A100-SXM4-40GB MIG 1g.5gb`` → ``1g.5gb``."""
    return name.rpartition("MIG ")[2]


def _on(mode: int) -> str:
    return "on" if mode else "off"


def not_offered(device: DeviceFacts) -> Check | None:
    missing = [text for question, text in _OFFERS.items() if device.unsupported(question)]
    if device.gpm is False or device.unsupported("gpm"):
        missing.append("GPM (SM, tensor and memory activity)")
    if not missing:
        return None
    in_mig = " (MIG mode is on)" if device.mig_mode and device.mig_mode.current else ""
    return Check("not offered", None, ", ".join(missing) + in_mig)


def gpm_access(machine: Machine, survey: Survey) -> Iterator[Check]:
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
