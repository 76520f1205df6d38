"""What is asked of GPM, and how its answers become series.

Identifiers and units as in nvml.h: shares are per cent, traffic is MiB/s. NVML answers for the
time between two samples, with a return code for each metric.
"""

from __future__ import annotations

import ctypes
import math
import struct
from collections.abc import Iterable, Mapping
from typing import Any

import pynvml

from warpwatch_devices.nvml.library import Meaning, meaning_of
from warpwatch_telemetry.metric import SeriesKey

# Shares above 1 by no more than this are rounding; what lies further out is no share at all.
ROUNDING_RATIO = 0.01
_BYTES_PER_MIB = 2**20

Answer = tuple[int, int, float]


def _share(name: str, *labels: str) -> SeriesKey:
    return f"device_{name}_ratio", labels


SHARES: Mapping[int, SeriesKey] = {
    pynvml.NVML_GPM_METRIC_GRAPHICS_UTIL: _share("graphics_active"),
    pynvml.NVML_GPM_METRIC_SM_UTIL: _share("sm_active"),
    pynvml.NVML_GPM_METRIC_SM_OCCUPANCY: _share("sm_occupancy"),
    pynvml.NVML_GPM_METRIC_INTEGER_UTIL: _share("pipe_active", "integer"),
    pynvml.NVML_GPM_METRIC_ANY_TENSOR_UTIL: _share("tensor_active"),
    pynvml.NVML_GPM_METRIC_DFMA_TENSOR_UTIL: _share("tensor_type_active", "dfma"),
    pynvml.NVML_GPM_METRIC_HMMA_TENSOR_UTIL: _share("tensor_type_active", "hmma"),
    pynvml.NVML_GPM_METRIC_IMMA_TENSOR_UTIL: _share("tensor_type_active", "imma"),
    pynvml.NVML_GPM_METRIC_DRAM_BW_UTIL: _share("dram_active"),
    pynvml.NVML_GPM_METRIC_FP64_UTIL: _share("pipe_active", "fp64"),
    pynvml.NVML_GPM_METRIC_FP32_UTIL: _share("pipe_active", "fp32"),
    pynvml.NVML_GPM_METRIC_FP16_UTIL: _share("pipe_active", "fp16"),
}
# The directions are the device's: what it sends is transmitted.
TRAFFIC: Mapping[int, str] = {
    pynvml.NVML_GPM_METRIC_PCIE_TX_PER_SEC: "device_pcie_transmit",
    pynvml.NVML_GPM_METRIC_PCIE_RX_PER_SEC: "device_pcie_receive",
    pynvml.NVML_GPM_METRIC_NVLINK_TOTAL_RX_PER_SEC: "device_nvlink_receive",
    pynvml.NVML_GPM_METRIC_NVLINK_TOTAL_TX_PER_SEC: "device_nvlink_transmit",
}

# metricId, nvmlReturn, value; the names that follow are not looked at.
_METRIC_BYTES = ctypes.sizeof(pynvml.c_nvmlGpmMetric_t)
_METRIC = struct.Struct(f"@IId{_METRIC_BYTES - 16}x")


class GpmRequest:
    """The metrics that are asked of one device, in a structure that is built once."""

    def __init__(self) -> None:
        self.metrics: tuple[int, ...] = ()
        self._request = pynvml.c_nvmlGpmMetricsGet_t()
        self._request.version = pynvml.NVML_GPM_METRICS_GET_VERSION
        self._answers = memoryview(self._request.metrics).cast("B")
        self._ask((*SHARES, *TRAFFIC))

    def between(self, earlier: Any, later: Any) -> Any:
        """The argument of nvmlGpmMetricsGet for the time between two samples."""
        self._request.sample1 = earlier
        self._request.sample2 = later
        return self._request

    def answers(self) -> list[Answer]:
        return list(_METRIC.iter_unpack(self._answers[: len(self.metrics) * _METRIC_BYTES]))

    def drop(self, refused: Iterable[int]) -> None:
        """Do not ask for these any more."""
        gone = frozenset(refused)
        if gone:
            self._ask(tuple(metric for metric in self.metrics if metric not in gone))

    def _ask(self, metrics: tuple[int, ...]) -> None:
        self.metrics = metrics
        self._request.numMetrics = len(metrics)
        for place, metric in enumerate(metrics):
            self._request.metrics[place].metricId = metric


def refused(answers: Iterable[Answer]) -> dict[int, Meaning]:
    """The metrics that the device will not answer, and why."""
    meanings = {metric: meaning_of(code) for metric, code, _ in answers if code}
    final = (Meaning.UNSUPPORTED, Meaning.NO_PERMISSION)
    return {metric: meaning for metric, meaning in meanings.items() if meaning in final}


def shares_of(answers: Iterable[Answer]) -> dict[SeriesKey, float]:
    """Ratios from 0 to 1. What is no number, or no share, is absent."""
    values = {}
    for metric, code, percent in answers:
        key = SHARES.get(metric)
        if key is None or code or not -ROUNDING_RATIO <= percent / 100 <= 1 + ROUNDING_RATIO:
            continue
        values[key] = round(min(max(percent / 100, 0.0), 1.0), 6)
    return values


def traffic_of(answers: Iterable[Answer]) -> dict[str, float]:
    """Bytes per second by the beginning of the series' name."""
    return {
        TRAFFIC[metric]: rate * _BYTES_PER_MIB
        for metric, code, rate in answers
        if metric in TRAFFIC and not code and math.isfinite(rate) and rate >= 0
    }
