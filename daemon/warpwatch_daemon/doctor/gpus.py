"""Checks the GPUs: their number, each GPU, its errors, heat, links, settings and XIDs.

A rule is a line of RULES and a function of one GPU's reading.
"""

from __future__ import annotations

import csv
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pynvml

from warpwatch_daemon.doctor.check import (
    BAD,
    CAP_SYS_ADMIN,
    NOTE,
    OK,
    Check,
    CheckInputs,
    Machine,
    gpu_set,
    merged,
)
from warpwatch_devices.nvml.library import name_of
from warpwatch_devices.nvml.survey import GpuReading, Survey
from warpwatch_devices.xids import PATH, parse_record, read_all, time_of
from warpwatch_telemetry.xids import explain

# ok, detail, advice; None: nothing to say.
Verdict = tuple[bool | None, str, str] | None

KERNEL_LOG = "`dmesg -T | grep -i -e NVRM -e Xid` says why"
_RESET = "end its processes, then `sudo nvidia-smi --gpu-reset -i {gpus}`"
# By subject and key: what is wrong, and the advice. "down" has NVML return codes of a whole GPU,
# "recovery" NVML_GPU_RECOVERY_ACTION_*, "slowed" throttle reasons outside the chip, "driver" kernel
# drivers other than NVIDIA's.
_FAULTS: dict[str, dict[str, tuple[str, str]]] = {}
with Path(__file__).with_name("faults.csv").open(newline="") as _file:
    for _subject, _key, _meaning, _advice in csv.reader(_file):
        _advice = _advice.replace("{reset}", _RESET).replace("{log}", KERNEL_LOG)
        _FAULTS.setdefault(_subject, {})[_key] = _meaning, _advice
_NEAR_LIMIT_C = 5
_BUSY_RATIO = 0.2
_DESKTOP_NAMES = ("GeForce", "RTX", "Quadro", "TITAN", "NVS", "T400", "T600", "T1000")


def checks(inputs: CheckInputs) -> Iterator[Check]:
    machine, survey = inputs.machine, inputs.survey
    yield from _hidden(machine, survey)
    if survey.started:
        yield from _count(machine, survey)
    for gpu in survey.gpus:
        yield _up(gpu) if gpu.up else _down(gpu, inputs)
    for rule in RULES:
        yield from merged((gpu.index, evaluate(rule, gpu)) for gpu in survey.up)
    yield from _gpm_access(machine, survey)


def _hidden(machine: Machine, survey: Survey) -> Iterator[Check]:
    """Yield GPUs that fell off the bus, or that another kernel driver or none has."""
    for gpu in machine.pci_gpus:
        if gpu.lost:
            advice = f"reseat or replace it after a power cycle; {KERNEL_LOG}"
            yield Check(f"PCI {gpu.bus_id}", BAD, "fallen off the bus (reads all ones)", advice)
        is_bound = gpu.driver == "nvidia" or (gpu.driver is None and not survey.started)
        if machine.in_container or is_bound:
            continue
        bind = ("", f"`echo {gpu.bus_id} | sudo tee /sys/bus/pci/drivers/nvidia/bind`")
        detail = f"a GPU with the kernel driver {gpu.driver or 'none'}, hidden from NVML"
        _, advice = _FAULTS["driver"].get(gpu.driver or "", bind)
        yield Check(f"PCI {gpu.bus_id}", NOTE, detail, advice)


def _count(machine: Machine, survey: Survey) -> Iterator[Check]:
    """Compare NVML's GPUs with those of the bus and the kernel module."""
    known, bound = {gpu.address for gpu in survey.gpus} - {""}, machine.bound_addresses
    missing = sorted(bound - known)
    total = max(len(known | bound), len(survey.gpus))
    detail = f"{len(survey.gpus)} of {total} GPUs with the nvidia driver"
    # A GPU without an answer has no known address.
    is_short = len(missing) > sum(1 for gpu in survey.gpus if not gpu.address)
    if is_short and not machine.in_container:
        advice = f"{KERNEL_LOG}; a reset or a power cycle may bring it back"
        yield Check("GPU count", BAD, f"{detail}; missing {', '.join(missing)}", advice)
    elif bound:
        # A container gets the GPUs that its creator chose.
        yield Check("GPU count", OK, detail + (" are in this container" if is_short else ""))


def _up(gpu: GpuReading) -> Check:
    value = gpu.value
    facts = [gpu.name or "unknown model", gpu.info.get("uuid", ""), gpu.address]
    if (celsius := value("temperature_celsius", "gpu")) is not None:
        facts.append(f"{celsius:.0f} °C")
    if (watts := value("power_watts")) is not None:
        limit = value("power_limit_watts")
        facts.append(f"{watts:.0f}{f' of {limit:.0f}' if limit else ''} W")
    if (used := value("memory_used_bytes")) is not None:
        total = value("memory_total_bytes") or 0
        facts.append(f"{used / 2**30:.1f} of {total / 2**30:.1f} GiB")
    if (busy := value("utilization_ratio")) is not None:
        facts.append(f"{busy * 100:.0f} % busy")
    return Check(f"GPU {gpu.index}", OK, ", ".join(fact for fact in facts if fact))


def _down(gpu: GpuReading, inputs: CheckInputs) -> Check:
    address = inputs.machine.gpu_addresses(inputs.survey).get(gpu.index)
    known = [fact for fact in (gpu.name, gpu.info.get("uuid"), address) if fact]
    if gpu.waiting_for is not None:
        what, advice = _silent(gpu.waiting_for, inputs.survey)
    else:
        code = gpu.code or pynvml.NVML_ERROR_UNKNOWN
        otherwise = (f"cannot be read: {pynvml.NVMLError(code)} ({code})", KERNEL_LOG)
        what, advice = _FAULTS["down"].get(name_of(code).upper(), otherwise)
    advice = advice.format(gpus=gpu.index, uid=inputs.machine.uid)
    return Check(f"GPU {gpu.index}", BAD, "; ".join([what, *known]), advice)


def _silent(request: str, survey: Survey) -> tuple[str, str]:
    request = request.replace("_", " ").replace("handle", "a handle")
    if survey.crashed_by is not None:
        return f"not asked to the end: the library crashed (at: {request})", KERNEL_LOG
    return (
        f"stuck: the driver has not answered for {survey.patience_s:g} s (asked for: {request})",
        KERNEL_LOG + "; processes in state D cannot be killed: drain the node and reboot it",
    )


def _gpm_access(machine: Machine, survey: Survey) -> Iterator[Check]:
    """Yield whether this user may take GPM samples of the GPUs that have GPM."""
    allowed = [gpu.index for gpu in survey.up if gpu.gpm == pynvml.NVML_SUCCESS]
    refused = [gpu.index for gpu in survey.up if gpu.gpm == pynvml.NVML_ERROR_NO_PERMISSION]
    if allowed:
        yield Check("GPM", OK, f"{gpu_set(allowed)}: uid {machine.uid} may take samples")
    if not refused:
        return
    detail = f"{gpu_set(refused)}: uid {machine.uid} may take no samples"
    is_restricted = "RmProfilingAdminOnly: 1" in (machine.text("/proc/driver/nvidia/params") or "")
    if is_restricted and not machine.has_capability(CAP_SYS_ADMIN):
        detail += " (the driver reserves profiling for CAP_SYS_ADMIN)"
    advice = (
        "give the daemon CAP_SYS_ADMIN, or `options nvidia NVreg_RestrictProfilingToAdminUsers=0` "
        "in /etc/modprobe.d and reload the driver"
    )
    yield Check("GPM", NOTE, detail, advice)


def _recovery(gpu: GpuReading, action: float) -> Verdict:
    if action == pynvml.NVML_GPU_RECOVERY_ACTION_NONE:
        return OK, "the driver asks for nothing", ""
    unknown = (f"take action {action:.0f}", "`nvidia-smi -q | grep -i recovery`")
    request, advice = _FAULTS["recovery"].get(f"{action:.0f}", unknown)
    return BAD, f"the driver asks to {request}", advice


def _uncorrected(gpu: GpuReading, volatile: float) -> Verdict:
    ever = gpu.value("ecc_aggregate_errors_total", "uncorrected")
    if volatile:
        detail = f"{volatile:.0f} since the driver was loaded, {ever or volatile:.0f} ever"
        return BAD, detail, _RESET + "; if they come back, `dcgmi diag -r 3` and replace the GPU"
    if ever:
        detail = f"none since the driver was loaded, {ever:.0f} ever"
        return NOTE, detail, "watch it; `nvidia-smi -q -d ECC` says where"
    return OK, "no errors", ""


def _remapping(gpu: GpuReading, failed: float) -> Verdict:
    rows = [gpu.value("remapped_rows", kind) or 0 for kind in ("correctable", "uncorrectable")]
    counted = f"{rows[0]:.0f} rows after correctable errors, {rows[1]:.0f} after others"
    if failed:
        advice = "drain the node and replace the GPU: no spare rows are left (`nvidia-smi -q`)"
        return BAD, f"failed; remapped so far: {counted}", advice
    if gpu.value("row_remap_pending"):
        return BAD, f"waits for a reset; remapped so far: {counted}", _RESET
    return OK, f"{counted}; spares are left" if any(rows) else "no rows remapped", ""


def _retired_pages(gpu: GpuReading, pending: float) -> Verdict:
    if not pending:
        return OK, "none pending", ""
    advice = _RESET + "; see `nvidia-smi -q -d PAGE_RETIREMENT`"
    return BAD, "pages wait to be retired until a reset", advice


def _temperature(gpu: GpuReading, celsius: float) -> Verdict:
    margin = gpu.value("temperature_margin_celsius")
    slowdown = gpu.value("temperature_threshold_celsius", "slowdown")
    if margin is None and slowdown:
        margin = slowdown - celsius
    if margin is None:
        return None
    if margin > _NEAR_LIMIT_C:
        return OK, f"more than {_NEAR_LIMIT_C} °C below the slowdown", ""
    side = "below" if margin > 0 else "above"
    detail = f"{celsius:.0f} °C, {abs(margin):.0f} °C {side} the slowdown"
    return BAD, detail, "cooling: fans, air flow, dust, inlet temperature, a neighbour's exhaust"


def _throttling(gpu: GpuReading, idle: float) -> Verdict:
    reasons = _FAULTS["slowed"].items()
    slowed = [texts for reason, texts in reasons if gpu.value("throttle_active", reason)]
    if slowed:
        return BAD, "slowed down now: " + ", ".join(what for what, _ in slowed), slowed[0][1]
    if gpu.value("throttle_active", "application_clocks"):
        advice = "`sudo nvidia-smi -i {gpus} -rac -rgc` if that is not wanted"
        return NOTE, "clocks are held down by a setting", advice
    if gpu.value("throttle_active", "sync_boost"):
        return NOTE, "clocks follow another GPU of a sync boost group", ""
    if gpu.value("throttle_active", "sw_power_cap"):
        return OK, "at the power limit, which is usual under full load", ""
    return OK, "none now", ""


def _pcie(gpu: GpuReading, generation: float) -> Verdict:
    width, widest = gpu.value("pcie_link_width_lanes"), gpu.value("pcie_link_width_max_lanes")
    best = gpu.value("pcie_link_generation_max")
    if width is None or best is None or widest is None:
        return None
    detail = f"generation {generation:.0f} x{width:.0f} of {best:.0f} x{widest:.0f}"
    if width < widest:
        advice = "reseat the card or its riser; slot wiring and BIOS bifurcation"
        return BAD, f"{detail}: lanes are missing", advice
    if generation >= best:
        return OK, detail, ""
    if (gpu.value("utilization_ratio") or 0) < _BUSY_RATIO:
        return OK, f"{detail} (idle links slow down)", ""
    advice = "BIOS link speed and ASPM, riser; `nvidia-smi -q -d PCIE`, replays in dmesg (AER)"
    return BAD, f"{detail} under load: the link is slow", advice


def _persistence(gpu: GpuReading, mode: float) -> Verdict:
    if mode:
        return OK, "on", ""
    detail = "off: the GPU is initialised again whenever no process has it open (slow first call, "
    detail += "clocks and limits forgotten)"
    advice = "`sudo systemctl enable --now nvidia-persistenced`, or `sudo nvidia-smi -pm 1`"
    return NOTE, detail, advice


def _pending(gpu: GpuReading, setting: str, mode: float) -> Verdict:
    """Return the verdict on a setting that changes with the next reset."""
    pending = gpu.pending.get(setting, mode)
    if pending == mode:
        return None
    now, then = ("on" if each else "off" for each in (mode, pending))
    advice = "`sudo nvidia-smi --gpu-reset -i {gpus}` once idle, or reboot"
    return NOTE, f"{now}, will be {then} after a reset", advice


def _ecc(gpu: GpuReading, mode: float) -> Verdict:
    if pending := _pending(gpu, "ECC", mode):
        return pending
    if mode:
        return OK, "on", ""
    if any(name in gpu.name for name in _DESKTOP_NAMES):
        return OK, "off, as desktop GPUs are delivered", ""
    advice = "`sudo nvidia-smi -i {gpus} -e 1`, then a reset"
    return BAD, "off: memory errors corrupt results unseen", advice


def _compute(gpu: GpuReading, mode: float) -> Verdict:
    advice = "`sudo nvidia-smi -i {gpus} -c DEFAULT`"
    if mode == pynvml.NVML_COMPUTEMODE_PROHIBITED:
        return BAD, "prohibited: no CUDA program can run", advice
    if mode == pynvml.NVML_COMPUTEMODE_DEFAULT:
        return OK, "default", ""
    subject = "thread" if mode == pynvml.NVML_COMPUTEMODE_EXCLUSIVE_THREAD else "process"
    advice += " if several processes shall share it"
    return NOTE, f"exclusive: one {subject} per GPU", advice


def _power_limit(gpu: GpuReading, limit: float) -> Verdict:
    default = gpu.value("power_limit_default_watts")
    if not limit or not default:
        return None
    if limit >= default:
        return OK, f"{limit:.0f} W", ""
    advice = f"`sudo nvidia-smi -i {{gpus}} -pl {default:.0f}` unless it is meant so"
    return NOTE, f"{limit:.0f} W, {default:.0f} W by default: slower under full load", advice


def _mig(gpu: GpuReading, mode: float) -> Verdict:
    if pending := _pending(gpu, "MIG", mode):
        return pending
    if not mode:
        return OK, "off", ""
    if not gpu.mig_devices:
        advice = "`sudo nvidia-smi mig -i {gpus} -cgi PROFILE -C` (`nvidia-smi mig -lgip`)"
        return NOTE, "on, but no instance: nothing can run", advice
    # ``NVIDIA A100-SXM4-40GB MIG 1g.5gb`` has the profile 1g.5gb.
    kinds = Counter(name.rpartition("MIG ")[2] for name in gpu.mig_devices)
    return OK, "on, " + ", ".join(f"{count} x {name}" for name, count in kinds.items()), ""


# By the name of the check: the value that the rule needs, and the rule.
RULES: dict[str, tuple[tuple[str, ...], Callable[[GpuReading, float], Verdict]]] = {
    "recovery": (("recovery_action",), _recovery),
    "uncorrected ECC": (("ecc_errors_total", "uncorrected"), _uncorrected),
    "row remapping": (("row_remap_failure",), _remapping),
    "retired pages": (("retired_pages_pending",), _retired_pages),
    "temperature": (("temperature_celsius", "gpu"), _temperature),
    "throttling": (("throttle_active", "idle"), _throttling),
    "PCIe": (("pcie_link_generation",), _pcie),
    "persistence": (("persistence_mode",), _persistence),
    "ECC": (("ecc_mode",), _ecc),
    "compute mode": (("compute_mode",), _compute),
    "power limit": (("power_limit_watts",), _power_limit),
    "MIG": (("mig_mode",), _mig),
}


def evaluate(rule: str, gpu: GpuReading) -> Check | None:
    """Return the finding of a rule, or None if the GPU did not answer what the rule needs."""
    key, function = RULES[rule]
    value = gpu.value(*key)
    verdict = None if value is None else function(gpu, value)
    return verdict and Check(rule, *verdict)


# An older error of a GPU that works again is history.
RECENT_S = 24 * 3600.0


def xid_checks(
    inputs: CheckInputs, monotonic: Callable[[], float] = time.monotonic
) -> Iterator[Check]:
    if not inputs.config.sources.kernel_log.enabled:
        yield Check("kernel log", NOTE, "switched off (sources.kernel_log.enabled)")
        return
    try:
        records = read_all(inputs.machine.path(PATH))
    except OSError as error:
        yield _unreadable(inputs.machine, error)
        return
    times: dict[tuple[str, int], list[float]] = {}
    for record in records:
        for found in parse_record(record):
            times.setdefault(found, []).append(max(0.0, monotonic() - time_of(record)))
    yield Check("kernel log", OK, f"{PATH} can be read{'' if times else ', no XID'}")
    gpus = inputs.machine.gpu_addresses(inputs.survey)
    for (address, xid), ages in sorted(times.items(), key=lambda item: item[1][-1]):
        yield _explained(_gpu(address, gpus), xid, ages)


def _unreadable(machine: Machine, error: OSError) -> Check:
    detail = f"{PATH}: {error.strerror}; XIDs come from the driver's events alone"
    if isinstance(error, FileNotFoundError):
        advice = f"let the container have {PATH} (`--device {PATH}`, or a hostPath with privilege)"
    else:
        advice = "run the daemon with CAP_SYSLOG, or `sudo sysctl kernel.dmesg_restrict=0`"
        if machine.in_container:
            advice += f", and {PATH} in the container's devices"
    return Check("kernel log", NOTE, detail, advice)


def _explained(gpu: str, xid: int, ages: list[float]) -> Check:
    entry, newest_s = explain(xid), ages[-1]
    when = "once, " if len(ages) == 1 else f"{len(ages)} times, last "
    detail = f"{gpu}: {entry.name}, {when}{_age(newest_s)} ago. {entry.meaning}"
    ok = BAD if entry.severity == "critical" and newest_s < RECENT_S else NOTE
    return Check(f"XID {xid}", ok, detail, entry.action)


def _gpu(address: str, gpus: dict[int, str]) -> str:
    """Return the index of the GPU at an address, which the driver writes without the function."""
    for index, known in gpus.items():
        if known.startswith(address.lower().partition(".")[0]):
            return f"GPU {index} ({address})"
    return address


def _age(age_s: float) -> str:
    for unit, length_s in (("d", 86400), ("h", 3600), ("min", 60)):
        if age_s >= length_s:
            return f"{age_s / length_s:.0f} {unit}"
    return f"{age_s:.0f} s"
