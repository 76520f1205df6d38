"""Explains the XIDs in the kernel log: which GPU, what each means, what to do."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from warpwatch_daemon.doctor.check import BAD, NOTE, OK, Check, CheckInputs
from warpwatch_daemon.doctor.machine import Machine
from warpwatch_devices.kernel_log import PATH, parse_record, read_all, time_of
from warpwatch_telemetry.xids import explain

# An older error of a GPU that works again is history.
RECENT_S = 24 * 3600.0


def checks(inputs: CheckInputs, monotonic: Callable[[], float] = time.monotonic) -> Iterator[Check]:
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
