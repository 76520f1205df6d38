"""The daemon's counters and GPM ratios while the GPU does work of a known kind."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from typing import Any

from benchmarks.gpu.loads import IDLE, KINDS, Progress, running
from benchmarks.gpu.readers import devices_of
from benchmarks.gpu.report import Report
from benchmarks.node import LocalDaemon, running_daemon
from benchmarks.processes import wait_until

# Averages of the driver are of a second, GPM's of a round: they must forget what was before.
SETTLE_S, WINDOW_S = 3.0, 8.0
QUICK_SETTLE_S, QUICK_WINDOW_S = 1.0, 2.2
POLL_S = 0.25
NONE, HIGH = (0.0, 0.05), (0.8, 1.05)
# Two ways to measure the same; with the headers of packets.
SAME, COPIED = (0.95, 1.05), (0.95, 1.3)
# Means of gauges, the growth of counters in a second, and the ratios of ``related``.
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
    # What goes to the device is received by it.
    "host_to_device": {"pcie_receive_bytes_total/copied": COPIED, "tensor_active_ratio": NONE},
    "device_to_host": {"pcie_transmit_bytes_total/copied": COPIED, "tensor_active_ratio": NONE},
}
ENERGY = ("energy_joules_total/power_watts", "energy_joules_total/power_instant_watts")
# These last no longer than the time that passes; in a smaller unit they would seem to.
TIMES = ("busy_seconds_total", "throttle_seconds_total", "violation_seconds_total")


def check(report: Report) -> None:
    quick = report.setting.quick
    with running_daemon() as daemon:
        wait_until(lambda: devices_of(daemon))
        for kind in KINDS:
            with report.part(kind) as figures, running(kind, report.setting) as progress:
                time.sleep(QUICK_SETTLE_S if quick else SETTLE_S)
                figures |= follow(daemon, progress, QUICK_WINDOW_S if quick else WINDOW_S)
                judge(report, kind, figures)


def follow(daemon: LocalDaemon, progress: Progress, window_s: float) -> dict[str, float]:
    """Of the first GPU: the growth of counters in a second, means of gauges, and ratios."""
    polls: list[dict[str, Any]] = []
    bytes_before, counted_at = progress.copied_bytes, progress.counted_at
    deadline = time.monotonic() + window_s
    while time.monotonic() < deadline:
        device = devices_of(daemon)[0]
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
    if progress.copied_bytes > bytes_before:
        taken_s = progress.counted_at - counted_at
        figures["copied"] = (progress.copied_bytes - bytes_before) / taken_s
    return {name: round(value, 6) for name, value in (figures | related(figures)).items()}


def related(figures: Mapping[str, float]) -> dict[str, float]:
    """Counters over what they must equal."""
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
