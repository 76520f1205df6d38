"""Checks every value of the daemon against `nvidia-smi -q -x`, and under loads of a known kind.

``readers.csv`` has a line for each of our series (without ``device_``) that nvidia-smi has: the
path in its XML as drivers 550 to 580 write it, the factor from its unit to ours, and how far the
value may change between two readings, in our unit. ``|`` separates alternative paths; the first one
that exists counts. The XML has no totals of ECC errors: without SRAM errors those of device memory
are the same. Reading a PCIe link wakes it up.
"""

from __future__ import annotations

import contextlib
import csv
import re
import shutil
import statistics
import subprocess
import threading
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.gpu.runner import CannotCheck, Report, RunSetting
from benchmarks.processes import LocalDaemon, running_daemon, wait_until

TABLE = Path(__file__).with_name("readers.csv")
SMI_TIMEOUT_S = 20.0
# Texts that stand for a missing value.
ABSENT = ("", "N/A", "[N/A]", "Not Supported", "[Not Supported]", "Unknown Error", "Not Found")
AGREE, BETWEEN, DIFFERS = "agree", "between", "differs"
OURS_ONLY, THEIRS_ONLY, NOT_COMPARABLE = "ours_only", "theirs_only", "not_comparable"

_WORDS = {
    **{"Enabled": 1.0, "Disabled": 0.0, "Active": 1.0, "Not Active": 0.0, "Yes": 1.0, "No": 0.0},
    # Compute mode, recovery action.
    **{"Default": 0.0, "Prohibited": 2.0, "Exclusive_Process": 3.0},
    **{"None": 0.0, "Reset": 1.0, "Reboot": 2.0, "Drain P2P": 3.0, "Drain and Reset": 4.0},
}
_NUMBER = re.compile(r"-?\d+(\.\d+)?")

# Texts by path in the XML.
Leaves = dict[str, str]
# After this time every reader has read once; GPM needs two rounds.
ROUNDS_S, QUICK_ROUNDS_S = 3.0, 1.2
# The texts that describe a device: our label, and nvidia-smi's path.
FACTS = {
    "name": "product_name",
    "driver_version": "driver_version",
    "pci_bus_id": "pci/pci_bus_id",
    "vbios_version": "vbios_version",
    "serial": "serial",
    "architecture": "product_architecture",
}


def check_readers(report: Report) -> None:
    rounds_s = QUICK_ROUNDS_S if report.setting.quick else ROUNDS_S
    for load in ("idle", "matmul"):
        with report.part(load) as figures:
            with running(load, report.setting):
                before = read_smi()
                devices = read_daemon(rounds_s)
                after = read_smi()
            for device in devices:
                found = compare(device, before[device["uuid"]], after[device["uuid"]])
                figures[str(device["index"])] = found
                report_values(report, f"GPU {device['index']} {load}", found)


def read_daemon(rounds_s: float) -> list[dict[str, Any]]:
    """Return the devices after the first rounds of a new daemon."""
    with running_daemon() as daemon:
        wait_until(lambda: daemon.devices())
        time.sleep(rounds_s)
        return daemon.devices()


def compare(device: Mapping[str, Any], before: Leaves, after: Leaves) -> dict[str, Any]:
    """Compare our reading with nvidia-smi's right before and after it."""
    ours, facts = device["values"], device["info"] | {"name": device["name"]}
    table = readings()
    rows = []
    for reading in table:
        value, theirs = ours.get(reading.series), (reading.text(before), reading.text(after))
        found = verdict(reading, value, *theirs)
        rows.append({"series": reading.series, "ours": value, "theirs": theirs, "verdict": found})
    known = {path for reading in table for path in reading.paths} | {*FACTS.values(), "uuid"}
    texts = {path: text for path, text in after.items() if text not in ABSENT}
    return {
        "rows": rows,
        # Only the names are kept: some texts identify the machine.
        "facts_that_differ": [
            label
            for label, path in FACTS.items()
            if path in texts and facts.get(label, "").lower() != texts[path].lower()
        ],
        "only_ours": sorted(ours.keys() - {reading.series for reading in table}),
        "only_theirs": sorted(texts.keys() - known),
    }


def report_values(report: Report, what: str, found: dict[str, Any]) -> None:
    verdicts = Counter(row["verdict"] for row in found["rows"])
    report.fact(f"{what}: " + ", ".join(f"{n} {verdict}" for verdict, n in verdicts.most_common()))
    for row in found["rows"]:
        text = f"{row['verdict']}: {row['series']} = {row['ours']}, theirs {row['theirs']}"
        if row["verdict"] in (DIFFERS, THEIRS_ONLY):
            report.expect(False, text)
        elif row["verdict"] not in (AGREE, BETWEEN):
            report.fact(text)
    differing = ", ".join(found["facts_that_differ"])
    report.expect(not differing, f"{what}: facts that differ: {differing or 'none'}")
    for key in ("only_ours", "only_theirs"):
        names = dict.fromkeys(name.partition("{")[0] for name in found[key])
        report.fact(f"{what}: {key.replace('_', ' ')}: {', '.join(names) or 'none'}")


# --- nvidia-smi ---


class SmiReading(NamedTuple):
    """A line of the table: our value is theirs times ``factor``, plus or minus ``moves``."""

    series: str
    paths: tuple[str, ...]
    factor: float
    moves: float

    def text(self, leaves: Leaves) -> str:
        return next((leaves[path] for path in self.paths if path in leaves), "")


def readings() -> list[SmiReading]:
    with TABLE.open(newline="") as file:
        _, *lines = csv.reader(file)
    return [
        SmiReading(series, tuple(path.split("|")), float(factor or 1), float(moves or 0))
        for series, path, factor, moves in lines
    ]


def read_smi() -> dict[str, Leaves]:
    """Return the texts of each GPU by UUID. Raises CannotCheck."""
    path = shutil.which("nvidia-smi")
    if path is None:
        raise CannotCheck("there is no nvidia-smi")
    try:
        text = subprocess.check_output([path, "-q", "-x"], text=True, timeout=SMI_TIMEOUT_S)
    except subprocess.SubprocessError as error:
        raise CannotCheck(f"nvidia-smi does not answer: {error}") from error
    return parse_smi(text)


def parse_smi(text: str) -> dict[str, Leaves]:
    """Return the texts of each GPU by UUID; a repeated path keeps its first text."""
    root = ElementTree.fromstring(text)
    found = {}
    for gpu in root.findall("gpu"):
        leaves = {"driver_version": root.findtext("driver_version", "")}
        _walk(gpu, "", leaves)
        found[leaves["uuid"]] = leaves
    return found


def _walk(element: ElementTree.Element, folder: str, leaves: Leaves) -> None:
    for child in element:
        if len(child):
            _walk(child, f"{folder}{child.tag}/", leaves)
        else:
            leaves.setdefault(f"{folder}{child.tag}", (child.text or "").strip())


def number(text: str) -> float | None:
    """Return the number in ``75.30 W``, ``16x``, ``P8``, ``1920 bank(s)``, or of ``Active``."""
    match = _NUMBER.search(text)
    return _WORDS.get(text, float(match[0]) if match else None)


def verdict(reading: SmiReading, ours: float | None, before: str, after: str) -> str:
    """Judge our value, which was read between the two of nvidia-smi."""
    first, second = number(before), number(after)
    theirs_known = before not in ABSENT or after not in ABSENT
    if ours is None:
        return THEIRS_ONLY if theirs_known else AGREE
    if first is None or second is None:
        return NOT_COMPARABLE if theirs_known else OURS_ONLY
    low, high = sorted((first * reading.factor, second * reading.factor))
    # The last written digit is rounded or cut off: 0.01 for 75.30 W.
    fraction = after.partition(".")[2].partition(" ")[0]
    step = 10.0 ** -len(fraction) * reading.factor * 1.001
    if min(abs(ours - low), abs(ours - high)) <= step:
        return AGREE
    room = step + reading.moves
    return BETWEEN if low - room <= ours <= high + room else DIFFERS


# --- counters and GPM ratios under known loads ---

IDLE = "idle"
KINDS = (IDLE, "matmul", "copy_on_device", "host_to_device", "device_to_host")
# The widths on a GPU, and on the CPU, on which only the loads themselves are tried.
_WIDTH, _SMALL_WIDTH = 8192, 128
_ROUNDS_AT_ONCE = 16
_STOP_TIMEOUT_S = 20.0
# The driver averages over a second and GPM over a round: wait until both contain only this load.
SETTLE_S, WINDOW_S = 3.0, 8.0
QUICK_SETTLE_S, QUICK_WINDOW_S = 1.0, 2.2
POLL_S = 0.25
NONE, HIGH = (0.0, 0.05), (0.8, 1.05)
# Ratios of two measurements of the same; a link also carries packet headers.
SAME, COPIED = (0.95, 1.05), (0.95, 1.3)
# Means of gauges, the growth of counters per second, and the ratios of ``related``.
EXPECTED = {
    IDLE: {
        "busy_seconds_total": NONE,
        "sm_active_ratio": NONE,
        "tensor_active_ratio": NONE,
        "dram_active_ratio": NONE,
    },
    "matmul": {
        "busy_seconds_total": HIGH,
        "graphics_active_ratio": HIGH,
        "sm_active_ratio": HIGH,
        "tensor_active_ratio": (0.4, 1.0),
        "tensor_type_active_ratio{type=hmma}": (0.4, 1.0),
    },
    "copy_on_device": {"dram_active_ratio": (0.6, 1.0), "tensor_active_ratio": NONE},
    # The directions are the device's.
    "host_to_device": {"pcie_receive_bytes_total/copied": COPIED, "tensor_active_ratio": NONE},
    "device_to_host": {"pcie_transmit_bytes_total/copied": COPIED, "tensor_active_ratio": NONE},
}
ENERGY = ("energy_joules_total/power_watts", "energy_joules_total/power_instant_watts")
# These grow by at most 1 s per second; a wrong unit would exceed that.
TIMES = ("busy_seconds_total", "throttle_seconds_total", "violation_seconds_total")


def check_counters(report: Report) -> None:
    quick = report.setting.quick
    with running_daemon() as daemon:
        wait_until(lambda: daemon.devices())
        for kind in KINDS:
            with report.part(kind) as figures, running(kind, report.setting) as copied:
                time.sleep(QUICK_SETTLE_S if quick else SETTLE_S)
                figures |= follow(daemon, copied, QUICK_WINDOW_S if quick else WINDOW_S)
                judge(report, kind, figures)


def follow(daemon: LocalDaemon, copied: Copied, window_s: float) -> dict[str, float]:
    """Return for the first GPU the growth of counters per second, means of gauges, and ratios."""
    polls: list[dict[str, Any]] = []
    bytes_before, counted_at = copied.total_bytes, copied.counted_at
    deadline = time.monotonic() + window_s
    while time.monotonic() < deadline:
        device = daemon.devices()[0]
        if not polls or device["time"] > polls[-1]["time"]:
            polls.append(device)
        time.sleep(POLL_S)
    span_s = polls[-1]["time"] - polls[0]["time"]
    figures = {"span_s": span_s}
    for series in polls[-1]["values"]:
        read = [poll["values"][series] for poll in polls if series in poll["values"]]
        if not series.partition("{")[0].endswith("_total"):
            figures[series] = statistics.fmean(read)
        elif len(read) == len(polls):
            figures[series] = (read[-1] - read[0]) / span_s
    if copied.total_bytes > bytes_before:
        taken_s = copied.counted_at - counted_at
        figures["copied"] = (copied.total_bytes - bytes_before) / taken_s
    return {name: round(value, 6) for name, value in (figures | related(figures)).items()}


def related(figures: Mapping[str, float]) -> dict[str, float]:
    """Return counters over the values that they must equal."""
    pairs = [name.split("/") for of in (*EXPECTED.values(), ENERGY) for name in of if "/" in name]
    return {
        f"{name}/{other}": figures[name] / figures[other]
        for name, other in pairs
        if name in figures and figures.get(other)
    }


def judge(report: Report, kind: str, figures: Mapping[str, float]) -> None:
    for name, (low, high) in EXPECTED[kind].items():
        text = f"{name} under {kind}: {figures.get(name)}, expected {low} to {high}"
        if name in figures:
            report.expect(low <= figures[name] <= high, text, timed=True)
        else:
            report.fact(text)
    for name, value in figures.items():
        if name.startswith(TIMES) and value:
            text = f"{name} under {kind} grows by {value} s in a second"
            report.expect(0 <= value <= SAME[1], text, timed=True)
    ratios = [figures[name] for name in ENERGY if name in figures]
    if ratios:
        text = f"energy under {kind}: {ratios} of average and newest power"
        report.expect(any(SAME[0] <= one <= SAME[1] for one in ratios), text, timed=True)


# --- loads ---


@dataclass(slots=True)
class Copied:
    """The bytes that a load has copied, and the time of that count."""

    total_bytes: int = 0
    counted_at: float = 0.0


@contextlib.contextmanager
def running(kind: str, setting: RunSetting) -> Iterator[Copied]:
    """Run a load during the block, warmed up before it. Raises CannotCheck."""
    copied, stop = Copied(), threading.Event()
    if kind == IDLE:
        yield copied
        return
    setting.need_torch()
    work, bytes_a_round, synchronize = _work(kind, setting.device)

    def round_() -> None:
        for _ in range(_ROUNDS_AT_ONCE):
            work()
        synchronize()
        copied.total_bytes += _ROUNDS_AT_ONCE * bytes_a_round
        copied.counted_at = time.monotonic()

    def work_on() -> None:
        while not stop.is_set():
            round_()

    round_()
    thread = threading.Thread(target=work_on, daemon=True)
    thread.start()
    try:
        yield copied
    finally:
        stop.set()
        thread.join(_STOP_TIMEOUT_S)


def _work(kind: str, device: str) -> tuple[Callable[[], object], int, Callable[[], None]]:
    """Return a round of work, the bytes that it copies, and a function that waits for it."""
    import torch

    cuda = device == "cuda"
    width = _WIDTH if cuda else _SMALL_WIDTH
    left, right = (torch.randn(width, width, device=device).bfloat16() for _ in range(2))
    product, host = torch.empty_like(left), torch.empty_like(left, device="cpu", pin_memory=cuda)
    rounds: dict[str, Callable[[], object]] = {
        "matmul": lambda: torch.matmul(left, right, out=product),
        "copy_on_device": lambda: product.copy_(left),
        "host_to_device": lambda: product.copy_(host, non_blocking=True),
        "device_to_host": lambda: host.copy_(left, non_blocking=True),
    }
    synchronize = torch.cuda.synchronize if cuda else lambda: None
    return rounds[kind], left.nbytes, synchronize
