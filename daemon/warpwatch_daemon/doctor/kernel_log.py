"""XIDs in the kernel log: which GPU, what each means, what to do; or what is needed to read it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from warpwatch_daemon.doctor.check import Check, CheckInputs
from warpwatch_daemon.doctor.machine import Machine, addresses
from warpwatch_devices.kernel_log import PATH, READ_BYTES, parse_record
from warpwatch_telemetry.xids import explain

# An older error of a GPU that works again is history.
RECENT_S = 24 * 3600.0
_LONGEST_LOG_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Occurrences:
    """How often an XID came from one GPU; ``age_s``: the last one, None when it has no time."""

    address: str
    xid: int
    count: int
    age_s: float | None


def checks(inputs: CheckInputs, monotonic: Callable[[], float] = time.monotonic) -> Iterator[Check]:
    if not inputs.config.sources.kernel_log.enabled:
        yield Check("kernel log", None, "switched off (sources.kernel_log.enabled)")
        return
    try:
        records = read_records(inputs.machine.path(PATH))
    except OSError as error:
        yield _unreadable(inputs.machine, error)
        return
    found = occurrences(records, monotonic())
    yield Check("kernel log", True, f"{PATH} can be read{'' if found else ', no XID'}")
    gpus = addresses(inputs.machine, inputs.survey)
    for occurrence in found:
        yield _explained(occurrence, gpus)


def _unreadable(machine: Machine, error: OSError) -> Check:
    detail = f"{PATH}: {error.strerror}; XIDs come from the driver's events alone"
    if isinstance(error, FileNotFoundError):
        advice = f"let the container have {PATH} (`--device {PATH}`, or a hostPath with privilege)"
    else:
        advice = "run the daemon with CAP_SYSLOG, or `sudo sysctl kernel.dmesg_restrict=0`"
        if machine.in_container:
            advice += f", and {PATH} in the container's devices"
    return Check("kernel log", None, detail, advice)


def read_records(path: Path) -> list[str]:
    """All records that the log holds now. Raises OSError where it may not be read."""
    log = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    chunks = []
    size = 0
    try:
        while size < _LONGEST_LOG_BYTES:
            try:
                chunk = os.read(log, READ_BYTES)
            except BrokenPipeError:
                continue  # records were overwritten before they were read
            except BlockingIOError:
                break
            if not chunk:
                break
            chunks.append(chunk)
            size += len(chunk)
    finally:
        os.close(log)
    return b"".join(chunks).decode(errors="replace").splitlines()


def occurrences(records: list[str], now_s: float) -> list[Occurrences]:
    """XIDs by GPU and number, the last one first. ``now_s``: seconds since boot."""
    found: dict[tuple[str, int], tuple[int, float | None]] = {}
    for record in records:
        for address, xid in parse_record(record):
            count, _ = found.get((address, xid), (0, None))
            found[address, xid] = count + 1, _age_s(record, now_s)
    listed = [Occurrences(*key, *value) for key, value in found.items()]
    return sorted(listed, key=lambda each: each.age_s or 0.0)


def _age_s(record: str, now_s: float) -> float | None:
    head, separator, _ = record.partition(";")
    parts = head.split(",")
    if not separator or len(parts) < 4 or not parts[2].isdigit():
        return None
    return max(0.0, now_s - int(parts[2]) / 1e6)


def _explained(seen: Occurrences, gpus: dict[int, str]) -> Check:
    entry = explain(seen.xid)
    times = "once" if seen.count == 1 else f"{seen.count} times"
    when = f", {'' if seen.count == 1 else 'last '}{_ago(seen.age_s)} ago" if seen.age_s else ""
    recent = seen.age_s is None or seen.age_s < RECENT_S
    detail = f"{_gpu(seen.address, gpus)}: {entry.name}, {times}{when}. {entry.meaning}"
    ok = False if entry.severity == "critical" and recent else None
    return Check(f"XID {seen.xid}", ok, detail, entry.action)


def _gpu(address: str, gpus: dict[int, str]) -> str:
    """The index of the GPU at a PCI address, as the driver writes it without the function."""
    for index, known in gpus.items():
        if known.startswith(address.lower().partition(".")[0]):
            return f"GPU {index} ({address})"
    return address


def _ago(age_s: float) -> str:
    for unit, length_s in (("d", 86400), ("h", 3600), ("min", 60)):
        if age_s >= length_s:
            return f"{age_s / length_s:.0f} {unit}"
    return f"{age_s:.0f} s"
