"""GPM's ratios under known loads, and over windows from 100 ms to 5 s."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Any

import pynvml

from benchmarks.gpu import nvml
from benchmarks.gpu.check import CannotCheck, Finding, Part, Setting
from benchmarks.gpu.fields import loaded
from warpwatch_devices.nvml.gpm_metrics import SHARES, TRAFFIC

LOADS = ("idle", "matmul", "copy_on_device", "host_to_device", "device_to_host")
WINDOWS_S = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
QUICK_WINDOWS_S = (0.1, 0.2)
# What is asked under each load: percent, MiB/s for traffic.
_GRAPHICS, _SM, _OCCUPANCY, _TENSOR, _HMMA, _DRAM = 1, 2, 3, 5, 7, 10
_PCIE_TX, _PCIE_RX = 20, 21
EXPECTED = {
    "idle": {_SM: (0, 5), _TENSOR: (0, 1), _DRAM: (0, 5)},
    "matmul": {_GRAPHICS: (80, 100), _SM: (80, 100), _TENSOR: (40, 100), _HMMA: (40, 100)},
    "copy_on_device": {_DRAM: (60, 100), _TENSOR: (0, 1)},
    "host_to_device": {_PCIE_RX: (5_000, 130_000), _TENSOR: (0, 1)},
    "device_to_host": {_PCIE_TX: (5_000, 130_000), _TENSOR: (0, 1)},
}
_MIB = 2**20


def parts(setting: Setting) -> Iterator[Part]:
    yield Part("all_metrics", all_metrics, all_findings)
    for kind in LOADS:
        yield Part(kind, _one(setting, kind), load_findings)


def _one(setting: Setting, kind: str) -> Any:
    return lambda: under_load(setting, kind)


def need_gpm(handle: Any) -> None:
    """Raises CannotCheck, NVMLError."""
    if not pynvml.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice:
        raise CannotCheck("the device has no GPM")


def all_metrics() -> dict[str, Any]:
    """Every metric that the library knows: which the device answers."""
    numbers = list(range(1, pynvml.NVML_GPM_METRIC_MAX))
    with nvml.first_gpu() as handle:
        need_gpm(handle)
        with nvml.gpm_samples(handle) as samples:
            samples.take()
            time.sleep(0.2)
            samples.take()
            answers = samples.metrics(numbers)
    codes: dict[str, list[int]] = {}
    for number, (code, _) in answers.items():
        codes.setdefault(code, []).append(number)
    return {"by_code": codes}


def all_findings(measured: dict[str, Any]) -> Iterable[Finding]:
    good = measured["by_code"].get("success", [])
    ours = {*SHARES, *TRAFFIC}
    yield Finding(None, f"GPM answers {len(good)} metrics, of ours {len(ours & set(good))}")


def under_load(setting: Setting, kind: str) -> dict[str, Any]:
    """Our metrics over one window after the other. Raises CannotCheck, NVMLError."""
    windows = {}
    with loaded(setting, kind) as load, nvml.first_gpu() as handle:
        need_gpm(handle)
        with nvml.gpm_samples(handle) as samples:
            samples.take()
            for window_s in QUICK_WINDOWS_S if setting.quick else WINDOWS_S:
                time.sleep(window_s)
                samples.take()
                windows[str(window_s)] = samples.metrics((*SHARES, *TRAFFIC))
        done = load.stop() if load is not None else {}
    return {"load": kind, "windows": windows, "did": done}


def load_findings(measured: dict[str, Any]) -> Iterable[Finding]:
    """By the longest window; whether the short ones say the same is to be seen in the numbers."""
    load, windows = measured["load"], measured["windows"]
    last = list(windows)[-1]
    answers = windows[last]
    for number, (low, high) in EXPECTED[load].items():
        code, value = answers[number]
        if value is None:
            yield Finding(None, f"GPM {number} under {load}: {code}")
            continue
        spread = [w[number][1] for w in windows.values() if w[number][1] is not None]
        text = f"GPM {number} under {load}: {value:.1f}, expected {low} to {high}"
        text += f"; over all windows {min(spread):.1f} to {max(spread):.1f}"
        yield Finding(low <= value <= high, text)
    shares = [value for number in SHARES if (value := answers[number][1]) is not None]
    yield Finding(all(0 <= share <= 101 for share in shares), f"shares of {load} are 0 to 100")
    yield from _traffic_findings(measured, answers)


def _traffic_findings(measured: dict[str, Any], answers: dict[int, Any]) -> Iterable[Finding]:
    """PCIe's rate against what the load says that it has copied."""
    number = {"host_to_device": _PCIE_RX, "device_to_host": _PCIE_TX}.get(measured["load"])
    done = measured["did"]
    if number is None or not done or answers[number][1] is None:
        return
    copied = done["bytes"] / (done["ended"] - done["began"]) / _MIB
    ratio = answers[number][1] / copied
    # Packets have headers, and the rate of the load holds its pauses.
    text = f"GPM {number} is {ratio:.3f} of the {copied:.0f} MiB/s that were copied"
    yield Finding(0.9 <= ratio <= 1.3, text)
