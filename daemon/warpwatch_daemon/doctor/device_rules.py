"""Rules on one GPU: memory errors, heat, throttling, the link to the host, and its settings.

A rule is a line of RULES and a function that judges what the GPU answered to one question.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import pynvml

from warpwatch_daemon.doctor.check import Check
from warpwatch_daemon.doctor.facts import DeviceFacts, Modes, Pcie, RemappedRows

_RESET = "end its processes, then `sudo nvidia-smi --gpu-reset -i {gpus}`"
# NVML_GPU_RECOVERY_ACTION_*: what the driver itself asks for.
_RECOVERY = {
    1: ("reset the GPU", _RESET),
    2: ("reboot the node", "drain the node and reboot it"),
    3: (
        "drain the GPU's peer-to-peer traffic, then reset it",
        "end the jobs of all GPUs linked with it, then `sudo nvidia-smi --gpu-reset -i {gpus}`",
    ),
    4: ("take no new work, end what runs, then reset", "drain the GPU; " + _RESET),
    5: ("recover the IMEX domain", "restart nvidia-imex on the nodes of the domain"),
    6: ("reset the GPU through its bus", "drain the node and reboot it"),
    7: ("reboot the system", "drain the node and power-cycle it"),
}
# Reasons that mean a fault outside the chip.
_SLOWED = {
    pynvml.nvmlClocksEventReasonHwThermalSlowdown: (
        "hardware thermal slowdown",
        "cooling: fans, air flow, dust, inlet temperature, `nvidia-smi -q -d TEMPERATURE`",
    ),
    pynvml.nvmlClocksEventReasonSwThermalSlowdown: (
        "thermal slowdown by the driver",
        "cooling: fans, air flow, inlet temperature, `nvidia-smi -q -d TEMPERATURE`",
    ),
    pynvml.nvmlClocksEventReasonHwPowerBrakeSlowdown: (
        "power brake from outside",
        "power supplies and power cap of the chassis (BMC: redundancy lost, rack limit)",
    ),
    pynvml.nvmlClocksEventReasonHwSlowdown: (
        "hardware slowdown",
        "heat or power supply: `nvidia-smi -q -d PERFORMANCE,TEMPERATURE`, power cables, BMC log",
    ),
}
_NEAR_LIMIT_C = 5
_BUSY_PERCENT = 20
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


def _ok(detail: str) -> Check:
    return Check("", True, detail)


def _note(detail: str, advice: str = "") -> Check:
    return Check("", None, detail, advice)


def _bad(detail: str, advice: str) -> Check:
    return Check("", False, detail, advice)


def _recovery(action: int, device: DeviceFacts) -> Check:
    if action == pynvml.NVML_GPU_RECOVERY_ACTION_NONE:
        return _ok("the driver asks for nothing")
    unknown = (f"action {action}", "`nvidia-smi -q | grep -i recovery`")
    what, advice = _RECOVERY.get(action, unknown)
    return _bad(f"the driver asks to {what}", advice)


def _uncorrected(volatile: int, device: DeviceFacts) -> Check:
    aggregate = device.uncorrected_aggregate
    if volatile:
        detail = f"{volatile} since the driver was loaded, {aggregate or volatile} ever"
        return _bad(detail, _RESET + "; if they come back, `dcgmi diag -r 3` and replace the GPU")
    if aggregate:
        detail = f"none since the driver was loaded, {aggregate} ever"
        return _note(detail, "watch it; `nvidia-smi -q -d ECC` says where")
    return _ok("no errors")


def _remapping(rows: RemappedRows, device: DeviceFacts) -> Check:
    counted = f"{rows.correctable} rows after correctable errors, {rows.uncorrectable} after others"
    if rows.failed:
        advice = "drain the node and replace the GPU: no spare rows are left (`nvidia-smi -q`)"
        return _bad(f"failed; remapped so far: {counted}", advice)
    if rows.pending:
        return _bad(f"waits for a reset; remapped so far: {counted}", _RESET)
    any_rows = rows.correctable or rows.uncorrectable
    return _ok(f"{counted}; spares are left" if any_rows else "no rows remapped")


def _retired_pages(pending: int, device: DeviceFacts) -> Check:
    if not pending:
        return _ok("none pending")
    advice = _RESET + "; see `nvidia-smi -q -d PAGE_RETIREMENT`"
    return _bad("pages wait to be retired until a reset", advice)


def _temperature(celsius: int, device: DeviceFacts) -> Check | None:
    margin = device.temperature_margin
    if margin is None and device.slowdown_temperature:
        margin = device.slowdown_temperature - celsius
    if margin is None:
        return None
    if margin > _NEAR_LIMIT_C:
        return _ok(f"more than {_NEAR_LIMIT_C} °C below the slowdown")
    side = "below" if margin > 0 else "above"
    detail = f"{celsius} °C, {abs(margin)} °C {side} the slowdown"
    return _bad(detail, "cooling: fans, air flow, dust, inlet temperature, a neighbour's exhaust")


def _throttling(reasons: int, device: DeviceFacts) -> Check:
    slowed = [texts for bit, texts in _SLOWED.items() if reasons & bit]
    if slowed:
        return _bad("slowed down now: " + ", ".join(what for what, _ in slowed), slowed[0][1])
    if reasons & pynvml.nvmlClocksEventReasonApplicationsClocksSetting:
        advice = "`sudo nvidia-smi -i {gpus} -rac -rgc` if that is not wanted"
        return _note("clocks are held down by a setting", advice)
    if reasons & pynvml.nvmlClocksEventReasonSyncBoost:
        return _note("clocks follow another GPU of a sync boost group")
    if reasons & pynvml.nvmlClocksEventReasonSwPowerCap:
        return _ok("at the power limit, which is usual under full load")
    return _ok("none now")


def _pcie(now: Pcie, device: DeviceFacts) -> Check | None:
    best = device.max_pcie
    if best is None:
        return None
    detail = f"generation {now.generation} x{now.width} of {best.generation} x{best.width}"
    if now.width < best.width:
        advice = "reseat the card or its riser; slot wiring and BIOS bifurcation"
        return _bad(f"{detail}: lanes are missing", advice)
    if now.generation >= best.generation:
        return _ok(detail)
    if (device.busy_percent or 0) < _BUSY_PERCENT:
        return _ok(f"{detail} (idle links slow down)")
    advice = "BIOS link speed and ASPM, riser; `nvidia-smi -q -d PCIE`, replays in dmesg (AER)"
    return _bad(f"{detail} under load: the link is slow", advice)


def _persistence(mode: int, device: DeviceFacts) -> Check:
    if mode:
        return _ok("on")
    detail = "off: the GPU is initialised again whenever no process has it open (slow first call, "
    detail += "clocks and limits forgotten)"
    advice = "`sudo systemctl enable --now nvidia-persistenced`, or `sudo nvidia-smi -pm 1`"
    return _note(detail, advice)


def _pending(modes: Modes) -> Check | None:
    """Of a setting that is about to change."""
    if modes.current == modes.pending:
        return None
    now, then = ("on" if mode else "off" for mode in modes)
    advice = "`sudo nvidia-smi --gpu-reset -i {gpus}` once idle, or reboot"
    return _note(f"{now}, will be {then} after a reset", advice)


def _ecc(modes: Modes, device: DeviceFacts) -> Check:
    if pending := _pending(modes):
        return pending
    if modes.current:
        return _ok("on")
    if any(name in (device.name or "") for name in _DESKTOP_NAMES):
        return _ok("off, as desktop GPUs are delivered")
    advice = "`sudo nvidia-smi -i {gpus} -e 1`, then a reset"
    return _bad("off: memory errors corrupt results unseen", advice)


def _compute(mode: int, device: DeviceFacts) -> Check:
    advice = "`sudo nvidia-smi -i {gpus} -c DEFAULT`"
    if mode == pynvml.NVML_COMPUTEMODE_PROHIBITED:
        return _bad("prohibited: no CUDA program can run", advice)
    alone = {
        pynvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS: "process",
        pynvml.NVML_COMPUTEMODE_EXCLUSIVE_THREAD: "thread",
    }.get(mode)
    if alone is None:
        return _ok("default")
    return _note(f"exclusive: one {alone} a GPU", f"{advice} if several processes shall share it")


def _power_limit(limit_mw: int, device: DeviceFacts) -> Check | None:
    default_mw = device.default_power_limit_mw
    if not limit_mw or not default_mw:
        return None
    limit, default = f"{limit_mw / 1000:.0f}", f"{default_mw / 1000:.0f}"
    if limit_mw >= default_mw:
        return _ok(f"{limit} W")
    advice = f"`sudo nvidia-smi -i {{gpus}} -pl {default}` unless it is meant so"
    return _note(f"{limit} W, {default} W by default: slower under full load", advice)


def _mig(modes: Modes, device: DeviceFacts) -> Check:
    if pending := _pending(modes):
        return pending
    if not modes.current:
        return _ok("off")
    if not device.mig_instances:
        advice = (
            "`sudo nvidia-smi mig -i {gpus} -cgi PROFILE -C` (profiles: `nvidia-smi mig -lgip`)"
        )
        return _note("on, but no instance: nothing can run", advice)
    # ``NVIDIA A100-SXM4-40GB MIG 1g.5gb`` has the profile 1g.5gb.
    kinds = Counter(name.rpartition("MIG ")[2] for name in device.mig_instances)
    return _ok("on, " + ", ".join(f"{count} x {name}" for name, count in kinds.items()))


def _not_offered(codes: object, device: DeviceFacts) -> Check | None:
    missing = [text for question, text in _OFFERS.items() if device.unsupported(question)]
    if device.gpm is False or device.unsupported("gpm"):
        missing.append("GPM (SM, tensor and memory activity)")
    if not missing:
        return None
    in_mig = " (MIG mode is on)" if device.mig_mode and device.mig_mode.current else ""
    return _note(", ".join(missing) + in_mig)


class Rule(NamedTuple):
    """The name of the check, the question whose answer it judges, and how."""

    name: str
    question: str
    judge: Callable[[Any, DeviceFacts], Check | None]

    def check(self, device: DeviceFacts) -> Check | None:
        """What a GPU did not tell is not judged."""
        answer = getattr(device, self.question)
        found = None if answer is None else self.judge(answer, device)
        return found and replace(found, name=self.name)


RULES = (
    Rule("recovery", "recovery_action", _recovery),
    Rule("uncorrected ECC", "uncorrected_volatile", _uncorrected),
    Rule("row remapping", "remapped_rows", _remapping),
    Rule("retired pages", "retired_pages_pending", _retired_pages),
    Rule("temperature", "temperature", _temperature),
    Rule("throttling", "clock_event_reasons", _throttling),
    Rule("PCIe", "pcie", _pcie),
    Rule("persistence", "persistence_mode", _persistence),
    Rule("ECC", "ecc_mode", _ecc),
    Rule("compute mode", "compute_mode", _compute),
    Rule("power limit", "power_limit_mw", _power_limit),
    Rule("MIG", "mig_mode", _mig),
    Rule("not offered", "codes", _not_offered),
)
