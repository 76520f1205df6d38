"""Rules on one GPU: memory errors, heat, throttling, and the link to the host."""

from __future__ import annotations

import pynvml

from warpwatch_daemon.doctor.check import Check
from warpwatch_daemon.doctor.facts import DeviceFacts

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
# Reasons that mean a fault outside the chip, and the power cap, which full load reaches.
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


def recovery_action(device: DeviceFacts) -> Check | None:
    if device.recovery_action is None:
        return None
    if device.recovery_action == pynvml.NVML_GPU_RECOVERY_ACTION_NONE:
        return Check("recovery", True, "the driver asks for nothing")
    unknown = (f"action {device.recovery_action}", "`nvidia-smi -q | grep -i recovery`")
    what, advice = _RECOVERY.get(device.recovery_action, unknown)
    return Check("recovery", False, f"the driver asks to {what}", advice)


def uncorrected_errors(device: DeviceFacts) -> Check | None:
    volatile, aggregate = device.uncorrected_volatile, device.uncorrected_aggregate
    if volatile is None:
        return None
    if volatile:
        detail = f"{volatile} since the driver was loaded, {aggregate or volatile} ever"
        advice = _RESET + "; if they come back, `dcgmi diag -r 3` and replace the GPU"
        return Check("uncorrected ECC", False, detail, advice)
    if aggregate:
        detail = f"none since the driver was loaded, {aggregate} ever"
        return Check("uncorrected ECC", None, detail, "watch it; `nvidia-smi -q -d ECC` says where")
    return Check("uncorrected ECC", True, "no errors")


def row_remapping(device: DeviceFacts) -> Check | None:
    rows = device.remapped_rows
    if rows is None:
        return None
    counted = f"{rows.correctable} rows after correctable errors, {rows.uncorrectable} after others"
    if rows.failed:
        advice = "drain the node and replace the GPU: no spare rows are left (`nvidia-smi -q`)"
        return Check("row remapping", False, f"failed; remapped so far: {counted}", advice)
    if rows.pending:
        detail = f"waits for a reset; remapped so far: {counted}"
        return Check("row remapping", False, detail, _RESET)
    if rows.correctable or rows.uncorrectable:
        return Check("row remapping", True, f"{counted}; spares are left")
    return Check("row remapping", True, "no rows remapped")


def retired_pages(device: DeviceFacts) -> Check | None:
    if device.retired_pages_pending is None:
        return None
    if device.retired_pages_pending:
        advice = _RESET + "; see `nvidia-smi -q -d PAGE_RETIREMENT`"
        return Check("retired pages", False, "pages wait to be retired until a reset", advice)
    return Check("retired pages", True, "none pending")


def temperature(device: DeviceFacts) -> Check | None:
    margin = device.temperature_margin
    if device.temperature is None:
        return None
    if margin is None and device.slowdown_temperature:
        margin = device.slowdown_temperature - device.temperature
    if margin is None:
        return None
    if margin > _NEAR_LIMIT_C:
        return Check("temperature", True, f"more than {_NEAR_LIMIT_C} °C below the slowdown")
    side = "below" if margin > 0 else "above"
    detail = f"{device.temperature} °C, {abs(margin)} °C {side} the slowdown"
    advice = "cooling: fans, air flow, dust, inlet temperature, a neighbour's exhaust"
    return Check("temperature", False, detail, advice)


def throttling(device: DeviceFacts) -> Check | None:
    reasons = device.clock_event_reasons
    if reasons is None:
        return None
    slowed = [texts for bit, texts in _SLOWED.items() if reasons & bit]
    if slowed:
        detail = "slowed down now: " + ", ".join(what for what, _ in slowed)
        return Check("throttling", False, detail, slowed[0][1])
    if reasons & pynvml.nvmlClocksEventReasonApplicationsClocksSetting:
        advice = "`sudo nvidia-smi -i {gpus} -rac -rgc` if that is not wanted"
        return Check("throttling", None, "clocks are held down by a setting", advice)
    if reasons & pynvml.nvmlClocksEventReasonSyncBoost:
        return Check("throttling", None, "clocks follow another GPU of a sync boost group")
    if reasons & pynvml.nvmlClocksEventReasonSwPowerCap:
        return Check("throttling", True, "at the power limit, which is usual under full load")
    return Check("throttling", True, "none now")


def pcie_link(device: DeviceFacts) -> Check | None:
    now, best = device.pcie, device.max_pcie
    if now is None or best is None:
        return None
    detail = f"generation {now.generation} x{now.width} of {best.generation} x{best.width}"
    if now.width < best.width:
        advice = "reseat the card or its riser; slot wiring and BIOS bifurcation"
        return Check("PCIe", False, f"{detail}: lanes are missing", advice)
    busy = (device.busy_percent or 0) >= _BUSY_PERCENT
    if now.generation < best.generation and busy:
        advice = "BIOS link speed and ASPM, riser; `nvidia-smi -q -d PCIE`, replays in dmesg (AER)"
        return Check("PCIe", False, f"{detail} under load: the link is slow", advice)
    if now.generation < best.generation:
        return Check("PCIe", True, f"{detail} (idle links slow down)")
    return Check("PCIe", True, detail)
