"""Checks the daemon's counters and GPM ratios while the GPU does work of a known kind."""

from __future__ import annotations

import contextlib
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.gpu.runner import Report, RunSetting
from benchmarks.processes import LocalDaemon, running_daemon, wait_until

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
