"""The driver's own sample buffers: several readings a second for the price of one call.

nvmlDeviceGetSamples gives what the driver sampled since a time; integrated, it loses nothing
between two rounds of ours.
"""

from __future__ import annotations

import contextlib
import ctypes
import struct
from collections.abc import Iterable
from typing import Any

import pynvml

from warpwatch.daemon.nvml.buffer import Buffer
from warpwatch.daemon.nvml.library import function
from warpwatch.daemon.nvml.tiers import Values
from warpwatch.telemetry.metric import SeriesKey

# nvmlSample_t: timeStamp (µs, the CPU's clock), value; samples of all types used here are integers.
_SAMPLE = struct.Struct("=QQ")
_CAPACITY = 256
# Two samples further apart than this were not taken in a row, if the buffer is shorter.
_LEAST_GAP_US = 2_000_000
_UINT32 = 2**32 - 1

BUSY_SECONDS: SeriesKey = ("device_busy_seconds_total", ())
ENERGY_JOULES: SeriesKey = ("device_energy_joules_total", ())


class Integral:
    """A counter of our own: a rate over time. It outlives the handle of its device."""

    def __init__(self) -> None:
        self.total = 0.0


class SampledIntegral:
    """Integrates one kind of the driver's samples, each for the time since the one before.

    ``per_unit``: what one unit of the sample adds to the integral in one second.
    """

    def __init__(self, kind: int, series: SeriesKey, per_unit: float, integral: Integral) -> None:
        self._kind = ctypes.c_uint(kind)
        self._series = series
        self._per_us = per_unit / 1e6
        self._integral = integral
        self._newest_us = 0
        self._longest_gap_us = _LEAST_GAP_US
        self._buffer = Buffer(_SAMPLE, _CAPACITY)

    def read(self, handle: Any) -> Values:
        """The integral up to the newest sample. Raises NVMLError."""
        ask = function("nvmlDeviceGetSamples")
        since, value_type = ctypes.c_ulonglong(self._newest_us), ctypes.byref(ctypes.c_uint())
        with contextlib.suppress(pynvml.NVMLError_NotFound):
            self.add(
                self._buffer.fill(
                    lambda structs, count: ask(
                        handle, self._kind, since, value_type, count, structs
                    )
                )
            )
        return {self._series: round(self._integral.total, 6)}

    def add(self, samples: Iterable[tuple[int, ...]]) -> None:
        """Integrate samples, (time in µs, value) each. The first time, what came before them is
        not ours to count: then they tell no more than how long the driver's buffer is.
        """
        new = sorted(sample for sample in samples if sample[0] > self._newest_us)
        if not new:
            return
        if self._newest_us == 0:
            self._longest_gap_us = max(_LEAST_GAP_US, new[-1][0] - new[0][0])
            self._newest_us = new[-1][0]
            return
        for time_us, raw in new:
            gap_us = time_us - self._newest_us
            value = raw & _UINT32
            if gap_us <= self._longest_gap_us and value != _UINT32:
                self._integral.total += value * gap_us * self._per_us
            self._newest_us = time_us


def busy_samples(integral: Integral) -> SampledIntegral:
    """Utilization in per cent: the time in which at least one kernel ran, in seconds."""
    kind = pynvml.NVML_GPU_UTILIZATION_SAMPLES
    return SampledIntegral(kind, BUSY_SECONDS, 0.01, integral)


def energy_samples(integral: Integral) -> SampledIntegral:
    """Power in milliwatts: energy in joules."""
    kind = pynvml.NVML_TOTAL_POWER_SAMPLES
    return SampledIntegral(kind, ENERGY_JOULES, 1e-3, integral)
