"""The driver's own sample buffers: several readings a second for the price of one call.

nvmlDeviceGetSamples gives what the driver sampled since a time; integrated, it loses nothing
between two rounds of ours.
"""

from __future__ import annotations

import contextlib
import ctypes
import struct
import time
from collections.abc import Callable, Iterable
from typing import Any

import pynvml

from warpwatch_devices.nvml.library import Buffer, function
from warpwatch_telemetry.metric import SeriesKey, Values

# nvmlSample_t: timeStamp (µs, the CPU's clock), value; samples of all types used here are integers.
_SAMPLE = struct.Struct("=QQ")
_CAPACITY = 256
# Two samples further apart than this were not taken in a row, if the buffer is shorter.
_LEAST_GAP_US = 2_000_000
_UINT32 = 2**32 - 1
# A sample further ahead of the clock than this was taken before the clock was set back.
_AHEAD_US = 2_000_000

BUSY_SECONDS: SeriesKey = ("device_busy_seconds_total", ())
ENERGY_JOULES: SeriesKey = ("device_energy_joules_total", ())


class Integral:
    """A counter of our own: a rate over time. It outlives its device's handle."""

    def __init__(self) -> None:
        self.total = 0.0


class NewestSample:
    """The time of the newest sample taken from a buffer of the driver; 0 means none.

    Samples have the CPU's clock. If that is set back, the old time would hide all new samples: then
    the buffer is read from its start, without the samples of the future.
    """

    def __init__(self, wall: Callable[[], float] = time.time) -> None:
        self.time_us = 0
        self._wall = wall

    def check(self) -> None:
        """Start again if the clock was set back; call this before a query."""
        if self.in_future(self.time_us):
            self.time_us = 0

    def in_future(self, time_us: int) -> bool:
        return time_us > self._wall() * 1e6 + _AHEAD_US


class SampledIntegral:
    """Integrates one kind of the driver's samples, each over the time since the last one.

    ``per_unit``: the growth of the integral per second and unit of the sample.
    """

    def __init__(
        self,
        kind: int,
        series: SeriesKey,
        per_unit: float,
        integral: Integral,
        wall: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._kind = ctypes.c_uint(kind)
        self._series = series
        self._per_us = per_unit / 1e6
        self._integral = integral
        self._newest = NewestSample(wall)
        self._monotonic = monotonic
        self._silent_since: float | None = None
        self._longest_gap_us = _LEAST_GAP_US
        self._buffer = Buffer(_SAMPLE, _CAPACITY)

    def read(self, handle: Any) -> Values:
        """Return the integral up to the newest sample. Raises NVMLError."""
        ask = function("nvmlDeviceGetSamples")
        self.check()
        since = ctypes.c_ulonglong(self._newest.time_us)
        value_type = ctypes.byref(ctypes.c_uint())
        samples: Iterable[tuple[int, ...]] = ()
        with contextlib.suppress(pynvml.NVMLError_NotFound):
            samples = self._buffer.fill(
                lambda structs, count: ask(handle, self._kind, since, value_type, count, structs)
            )
        self.add(samples)
        return {self._series: round(self._integral.total, 6)}

    def check(self) -> None:
        """Start again after the clock was set back or after a silence longer than the buffer."""
        self._newest.check()
        silent_since = self._silent_since
        if silent_since is None or (self._monotonic() - silent_since) * 1e6 <= self._longest_gap_us:
            return
        self._newest.time_us = 0
        self._silent_since = None

    def add(self, samples: Iterable[tuple[int, ...]]) -> None:
        """Integrate samples, (time in µs, value) each.

        The first samples only show how long the driver's buffer is; the time before them is not
        counted.
        """
        newest = self._newest
        new = sorted(s for s in samples if s[0] > newest.time_us and not newest.in_future(s[0]))
        if not new:
            self._silent_since = self._silent_since or self._monotonic()
            return
        self._silent_since = None
        if newest.time_us == 0:
            self._longest_gap_us = max(_LEAST_GAP_US, new[-1][0] - new[0][0])
            newest.time_us = new[-1][0]
            return
        for time_us, raw in new:
            gap_us = time_us - newest.time_us
            value = raw & _UINT32
            if gap_us <= self._longest_gap_us and value != _UINT32:
                self._integral.total += value * gap_us * self._per_us
            newest.time_us = time_us


def busy_samples(integral: Integral, *clocks: Callable[[], float]) -> SampledIntegral:
    """Return the integral of utilization: the seconds in which at least one kernel ran."""
    kind = pynvml.NVML_GPU_UTILIZATION_SAMPLES
    return SampledIntegral(kind, BUSY_SECONDS, 0.01, integral, *clocks)


def energy_samples(integral: Integral, *clocks: Callable[[], float]) -> SampledIntegral:
    """Return the integral of power in milliwatts: energy in joules."""
    kind = pynvml.NVML_TOTAL_POWER_SAMPLES
    return SampledIntegral(kind, ENERGY_JOULES, 1e-3, integral, *clocks)
