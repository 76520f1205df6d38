"""Counters of our own: integrals of the driver's samples, and PCIe bytes from two sources.

nvmlDeviceGetSamples returns what the driver has sampled since a time: several readings per second
in one call, and nothing is lost between two rounds of ours.
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
# New samples over this share of the buffer's length fill it, so that others were overwritten.
_FULL_RATIO = 0.9
_UINT32 = 2**32 - 1
# A sample further ahead of the clock than this was taken before the clock was set back.
_AHEAD_US = 2_000_000

BUSY_SECONDS: SeriesKey = ("device_busy_seconds_total", ())
ENERGY_JOULES: SeriesKey = ("device_energy_joules_total", ())
PCIE_BYTES: tuple[SeriesKey, ...] = (
    ("device_pcie_receive_bytes_total", ()),
    ("device_pcie_transmit_bytes_total", ()),
)


class Integral:
    """A rate over time. It outlives its device's handle."""

    def __init__(self) -> None:
        self.total = 0.0


class NewestSample:
    """The time of the newest sample read from a buffer of the driver; 0 means none.

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
        self._longest_gap_us = _LEAST_GAP_US
        self._monotonic = monotonic
        self._read_at = 0.0
        self._buffer = Buffer(_SAMPLE, _CAPACITY)

    def read(self, handle: Any) -> Values:
        """Return the integral up to the newest sample. Raises NVMLError."""
        ask = function("nvmlDeviceGetSamples")
        self._newest.check()
        since = ctypes.c_ulonglong(self._newest.time_us)
        value_type = ctypes.byref(ctypes.c_uint())
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
        """Integrate samples, (time in µs, value) each.

        The first samples only show how long the driver's buffer is; the time before them is not
        counted. If new samples fill the buffer, as with long intervals between readings, their mean
        stands for those that the driver has overwritten.
        """
        newest = self._newest
        newest.check()
        new = sorted(s for s in samples if s[0] > newest.time_us and not newest.in_future(s[0]))
        if not new:
            return
        span_us, since_us = new[-1][0] - new[0][0], new[0][0] - newest.time_us
        last_read_at, self._read_at = self._read_at, self._monotonic()
        if newest.time_us == 0:
            self._longest_gap_us = max(_LEAST_GAP_US, span_us)
            newest.time_us = new[-1][0]
            return
        is_full = span_us >= _FULL_RATIO * self._longest_gap_us
        # The clock may also have been set ahead.
        has_passed = since_us <= (self._read_at - last_read_at) * 1e6
        if is_full and has_passed and since_us > self._longest_gap_us:
            known = [raw & _UINT32 for _, raw in new if raw & _UINT32 != _UINT32]
            self._add(sum(known) / max(1, len(known)), since_us)
        for time_us, raw in new:
            gap_us = time_us - newest.time_us
            if gap_us <= self._longest_gap_us and raw & _UINT32 != _UINT32:
                self._add(raw & _UINT32, gap_us)
            newest.time_us = time_us

    def _add(self, value: float, time_us: int) -> None:
        self._integral.total += value * time_us * self._per_us


def busy_samples(
    integral: Integral,
    wall: Callable[[], float] = time.time,
    monotonic: Callable[[], float] = time.monotonic,
) -> SampledIntegral:
    """Return the integral of utilization: the seconds in which at least one kernel ran."""
    kind = pynvml.NVML_GPU_UTILIZATION_SAMPLES
    return SampledIntegral(kind, BUSY_SECONDS, 0.01, integral, wall, monotonic)


def energy_samples(integral: Integral, wall: Callable[[], float] = time.time) -> SampledIntegral:
    """Return the integral of power in milliwatts: energy in joules."""
    kind = pynvml.NVML_TOTAL_POWER_SAMPLES
    return SampledIntegral(kind, ENERGY_JOULES, 1e-3, integral, wall)


class ContinuedCounter:
    """A total of what several counters count, one at a time."""

    def __init__(self) -> None:
        self._total: float | None = None
        self._newest: tuple[str, float] = ("", 0.0)

    def total(self, source: str, raw: float) -> float:
        """Add the growth of ``source`` since its last reading.

        The growth is unknown after a change of source. A counter that falls has started again.
        """
        last_source, before = self._newest
        self._newest = (source, raw)
        if self._total is None:
            self._total = raw
        elif last_source == source:
            self._total += raw - before if raw >= before else raw
        return self._total


class PcieBytes:
    """The PCIe byte counters of a GPU: from GPM's rates if it has them, else from two fields.

    The fields have 32 or 64 bits, and a fast link fills 32 bits several times per second. So they
    count only once one of them is seen to have more. Totals outlive handles, and continue when
    their source changes.
    """

    def __init__(self) -> None:
        self._counters = {key: ContinuedCounter() for key in PCIE_BYTES}
        self._wide = False

    def count(self, values: Values, gpm: Values | None) -> None:
        """Replace the values of the fields by totals, or remove them if these are unknown.

        ``gpm`` is None for a GPU without GPM.
        """
        fields = {key: values.pop(key) for key in PCIE_BYTES if key in values}
        self._wide = self._wide or any(raw > _UINT32 for raw in fields.values())
        source = "fields" if gpm is None else "gpm"
        if gpm is None:
            counted = fields if self._wide else {}
        else:
            counted = {key: gpm[key] for key in PCIE_BYTES if key in gpm}
        values.update({key: self._counters[key].total(source, raw) for key, raw in counted.items()})
