"""Defines the readers of a device, and when each runs: every round, rarely, or once.

A reader takes a device handle and returns series in base units. It raises NVMLError, which the
schedule interprets. Slowly changing values are read at long intervals and kept in between; the
rounds of slow readers are spread over readers and devices, so that they never coincide.
"""

from __future__ import annotations

import ctypes
import logging
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import pynvml

from warpwatch_devices.nvml.fields import (
    RARE_FIELDS,
    SLOW_FIELDS,
    FieldBatch,
    Parts,
    TimedReader,
    fast_fields,
)
from warpwatch_devices.nvml.library import (
    CallCosts,
    DeviceGone,
    Meaning,
    classify,
    code_of,
    meaning_of,
    reason_of,
)
from warpwatch_telemetry.catalogue import REMAP_AVAILABILITIES, THROTTLE_REASONS
from warpwatch_telemetry.metric import SeriesKey, Values

logger = logging.getLogger(__name__)

# Seconds between two readings, by how soon a change matters.
SLOW_S = 10.0
SLOWER_S = 30.0
RARE_S = 60.0
ONCE = math.inf
# Shorter rounds count as this long, so that the cost of a round stays the same.
_LEAST_ROUND_S = 1.0


def rounds_of(period_s: float, interval_s: float) -> int:
    """Return the number of rounds between two readings ``period_s`` apart."""
    return max(1, round(period_s / max(interval_s, _LEAST_ROUND_S)))


_MHZ = 1_000_000
_HEAT_S = 2.0
_CLOCKS = {
    "graphics": pynvml.NVML_CLOCK_GRAPHICS,
    "sm": pynvml.NVML_CLOCK_SM,
    "memory": pynvml.NVML_CLOCK_MEM,
    "video": pynvml.NVML_CLOCK_VIDEO,
}
_THRESHOLDS = {
    "shutdown": pynvml.NVML_TEMPERATURE_THRESHOLD_SHUTDOWN,
    "slowdown": pynvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN,
    "memory_max": pynvml.NVML_TEMPERATURE_THRESHOLD_MEM_MAX,
    "gpu_max": pynvml.NVML_TEMPERATURE_THRESHOLD_GPU_MAX,
}
Read = Callable[[Any], Values]


def _no_samples(handle: Any) -> Values:
    """Return no values: a single reading of the sample buffers integrates nothing."""
    return {}


def fast_readers(busy_samples: Callable[[Any], Values]) -> Iterable[TimedReader]:
    """Yield the readers of every round."""
    yield TimedReader("utilization", _utilization)
    yield TimedReader("utilization_samples", busy_samples)
    yield TimedReader("memory", memory_reader())
    # Heat takes seconds.
    yield TimedReader("temperature", _first_of(_temperature, _old_temperature), _HEAT_S)
    yield TimedReader("throttle", _first_of(_event_reasons, _throttle_reasons))
    yield TimedReader("clock", _clock("sm"))


def slow_readers(fans: int) -> Iterable[TimedReader]:
    """Yield the rarely run readers."""
    for domain, period_s in (("memory", SLOW_S), ("graphics", SLOW_S), ("video", SLOWER_S)):
        yield TimedReader("clock", _clock(domain), period_s)
    for name, series, call, period_s in _SINGLE_VALUES:
        yield TimedReader(name, value_of(key_of(series), call), period_s)
    yield TimedReader("performance_state", _performance_state, SLOW_S)
    yield TimedReader("bar1", _bar1, SLOWER_S)
    for fan in range(fans):
        yield TimedReader("fan_speed", _fan_speed(fan), SLOWER_S)
    yield TimedReader("row_remap_banks", _row_remap_banks, RARE_S)
    fabric = (pynvml.c_nvmlGpuFabricInfo_v3_t, pynvml.c_nvmlGpuFabricInfo_v2_t)
    yield TimedReader("fabric", _first_of(*map(_fabric, fabric)), SLOWER_S)
    yield TimedReader("vgpu_license", _vgpu_licensed, RARE_S)


def static_readers() -> Iterable[TimedReader]:
    """Yield the readers that run once: their values change only with the driver."""
    for domain in _CLOCKS:
        yield TimedReader("clock_max", _clock_max(domain), ONCE)
    for name in _THRESHOLDS:
        yield TimedReader("temperature_threshold", _threshold(name), ONCE)


def memory_reader() -> Read:
    return _first_of(_memory, _old_memory)


def _memory(handle: Any) -> Values:
    info = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
    return {
        _MEMORY_USED: info.used,
        _MEMORY_FREE: info.free,
        _MEMORY_TOTAL: info.total,
        _MEMORY_RESERVED: info.reserved,
    }


def _old_memory(handle: Any) -> Values:
    """Read the memory before driver 510, with the driver's own share as used."""
    info = pynvml.nvmlDeviceGetMemoryInfo(handle)
    return {_MEMORY_USED: info.used, _MEMORY_FREE: info.free, _MEMORY_TOTAL: info.total}


def key_of(name: str, *own: str) -> SeriesKey:
    return (f"device_{name}", own)


UTILIZATION, MIG_MODE = key_of("utilization_ratio"), key_of("mig_mode")
_MEMORY_UTILIZATION = key_of("memory_utilization_ratio")
_MEMORY_USED, _MEMORY_FREE = key_of("memory_used_bytes"), key_of("memory_free_bytes")
_MEMORY_TOTAL, _MEMORY_RESERVED = key_of("memory_total_bytes"), key_of("memory_reserved_bytes")
_TEMPERATURE = key_of("temperature_celsius", "gpu")
_THROTTLED = tuple(key_of("throttle_active", reason) for reason in THROTTLE_REASONS)


def value_of(key: SeriesKey, read: Callable[[Any], float], divisor: int = 1) -> Read:
    if divisor == 1:
        return lambda handle: {key: read(handle)}
    return lambda handle: {key: read(handle) / divisor}


def _first_of(first: Read, second: Read) -> Read:
    """Return a reader that uses ``second`` once the driver turns out to lack ``first``."""
    chosen = first

    def read(handle: Any) -> Values:
        nonlocal chosen
        try:
            return chosen(handle)
        except pynvml.NVMLError as error:
            if meaning_of(code_of(error)) is not Meaning.UNSUPPORTED:
                raise
            chosen = second
            return second(handle)

    return read


def _utilization(handle: Any) -> Values:
    rates = pynvml.nvmlDeviceGetUtilizationRates(handle)
    return {UTILIZATION: rates.gpu / 100, _MEMORY_UTILIZATION: rates.memory / 100}


def _temperature(handle: Any) -> Values:
    return {_TEMPERATURE: pynvml.nvmlDeviceGetTemperatureV(handle, pynvml.NVML_TEMPERATURE_GPU)}


def _old_temperature(handle: Any) -> Values:
    """Read with the older call, which CUDA 14 removes."""
    return {_TEMPERATURE: pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU)}


def _event_reasons(handle: Any) -> Values:
    return _reasons(pynvml.nvmlDeviceGetCurrentClocksEventReasons(handle))


def _throttle_reasons(handle: Any) -> Values:
    """Read with the older name of the call."""
    return _reasons(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))


def _reasons(bits: int) -> Values:
    """Return the bits, which are in the order of THROTTLE_REASONS."""
    return {key: bits >> bit & 1 for bit, key in enumerate(_THROTTLED)}


def _clock(domain: str) -> Read:
    key, kind = key_of("clock_hertz", domain), _CLOCKS[domain]
    return lambda handle: {key: pynvml.nvmlDeviceGetClockInfo(handle, kind) * _MHZ}


def _clock_max(domain: str) -> Read:
    key, kind = key_of("clock_max_hertz", domain), _CLOCKS[domain]
    return lambda handle: {key: pynvml.nvmlDeviceGetMaxClockInfo(handle, kind) * _MHZ}


def _threshold(name: str) -> Read:
    """Return a reader; from Ada on, devices have margins (fields 193-196) instead of some."""
    key, kind = key_of("temperature_threshold_celsius", name), _THRESHOLDS[name]
    return lambda handle: {key: pynvml.nvmlDeviceGetTemperatureThreshold(handle, kind)}


def _fan_speed(fan: int) -> Read:
    key = key_of("fan_speed_ratio", str(fan))
    return lambda handle: {key: pynvml.nvmlDeviceGetFanSpeed_v2(handle, fan) / 100}


def _performance_state(handle: Any) -> Values:
    state = pynvml.nvmlDeviceGetPerformanceState(handle)
    return {} if state == pynvml.NVML_PSTATE_UNKNOWN else {key_of("performance_state"): state}


def _bar1(handle: Any) -> Values:
    info = pynvml.nvmlDeviceGetBAR1MemoryInfo(handle)
    return {
        key_of("bar1_memory_used_bytes"): info.bar1Used,
        key_of("bar1_memory_free_bytes"): info.bar1Free,
        key_of("bar1_memory_total_bytes"): info.bar1Total,
    }


def _row_remap_banks(handle: Any) -> Values:
    banks = pynvml.nvmlDeviceGetRowRemapperHistogram(handle)
    return {key_of("row_remap_banks", name): getattr(banks, name) for name in REMAP_AVAILABILITIES}


def _vgpu_licensed(handle: Any) -> Values:
    """Read the license, which only a virtual machine with a vGPU has."""
    mode = pynvml.nvmlDeviceGetVirtualizationMode(handle)
    licensed = False
    if mode == pynvml.NVML_GPU_VIRTUALIZATION_MODE_VGPU:
        answer = pynvml.nvmlDeviceGetGridLicensableFeatures(handle)
        features = answer.gridLicensableFeatures[: answer.licensableFeaturesCount]
        licensed = any(feature.featureState for feature in features)
    return {key_of("vgpu_licensed"): int(licensed)}


def _fabric(version: Callable[[], Any]) -> Read:
    """Return a reader; without an NVLink fabric there are no values, in old drivers no health."""

    def read(handle: Any) -> Values:
        info = version()
        pynvml.nvmlDeviceGetGpuFabricInfoV(handle, ctypes.byref(info))
        values: dict[SeriesKey, float] = {}
        if info.state != pynvml.NVML_GPU_FABRIC_STATE_NOT_SUPPORTED:
            values[key_of("nvlink_fabric_state")] = info.state
        health = getattr(info, "healthSummary", 0)
        if health != pynvml.NVML_GPU_FABRIC_HEALTH_SUMMARY_NOT_SUPPORTED:
            healthy = pynvml.NVML_GPU_FABRIC_HEALTH_SUMMARY_HEALTHY
            values[key_of("nvlink_fabric_healthy")] = int(health == healthy)
        return values

    return read


def _share_of(engine: str) -> Callable[[Any], float]:
    """Return a call for a utilization in per cent, without its sampling period."""
    call = getattr(pynvml, f"nvmlDeviceGet{engine}Utilization")
    return lambda handle: call(handle)[0] / 100


# Calls with a single value: the reader, its series, the call, and the period in seconds.
_SINGLE_VALUES: tuple[tuple[str, str, Callable[[Any], float], float], ...] = (
    ("encoder", "encoder_utilization_ratio", _share_of("Encoder"), SLOW_S),
    ("decoder", "decoder_utilization_ratio", _share_of("Decoder"), SLOW_S),
    ("jpeg", "jpeg_utilization_ratio", _share_of("Jpg"), SLOWER_S),
    ("ofa", "ofa_utilization_ratio", _share_of("Ofa"), SLOWER_S),
    (
        "temperature_margin",
        "temperature_margin_celsius",
        pynvml.nvmlDeviceGetMarginTemperature,
        SLOW_S,
    ),
    (
        "pcie_link_generation",
        "pcie_link_generation",
        pynvml.nvmlDeviceGetCurrPcieLinkGeneration,
        SLOWER_S,
    ),
    ("pcie_link_width", "pcie_link_width_lanes", pynvml.nvmlDeviceGetCurrPcieLinkWidth, SLOWER_S),
    ("pcie_link_max", "pcie_link_generation_max", pynvml.nvmlDeviceGetMaxPcieLinkGeneration, ONCE),
    ("pcie_link_max", "pcie_link_width_max_lanes", pynvml.nvmlDeviceGetMaxPcieLinkWidth, ONCE),
    ("mig_mode", "mig_mode", lambda handle: pynvml.nvmlDeviceGetMigMode(handle)[0], SLOW_S),
    ("persistence_mode", "persistence_mode", pynvml.nvmlDeviceGetPersistenceMode, RARE_S),
    ("compute_mode", "compute_mode", pynvml.nvmlDeviceGetComputeMode, RARE_S),
)


def field_substitutes(energy_samples: Read) -> Iterable[TimedReader]:
    """Yield readers for devices and drivers that lack a field."""

    def instead(number: int, name: str, read: Read, period_s: float = 0.0) -> TimedReader:
        return TimedReader(name, read, period_s, instead_of=number)

    yield instead(pynvml.NVML_FI_DEV_POWER_AVERAGE, "power", _power)
    yield instead(pynvml.NVML_FI_DEV_TOTAL_ENERGY_CONSUMPTION, "power_samples", energy_samples)
    current = pynvml.NVML_FI_DEV_POWER_CURRENT_LIMIT
    yield instead(current, "power_limit", _power_limit, SLOWER_S)
    default = pynvml.NVML_FI_DEV_POWER_DEFAULT_LIMIT
    yield instead(default, "power_limit", _power_limit_default, RARE_S)
    highest = pynvml.NVML_FI_DEV_POWER_MAX_LIMIT
    yield instead(highest, "power_limit", _power_limit_range, RARE_S)
    state = pynvml.NVML_FI_DEV_NVLINK_GET_STATE
    for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
        yield instead(state, "nvlink_state", _nvlink_state(link), RARE_S)


def readers_of(
    driver_version: str,
    fans: int,
    busy_samples: Read = _no_samples,
    energy_samples: Read = _no_samples,
    parts: Parts | None = None,
) -> tuple[tuple[TimedReader, ...], Callable[[int], bool]]:
    """Return all readers of a device, and a function that says whether it lacks a field.

    parts: as for FieldBatch.
    """
    fast = FieldBatch("fields", fast_fields(driver_version))
    slow = FieldBatch("slow_fields", SLOW_FIELDS, SLOW_S, parts)
    rare = FieldBatch("rare_fields", RARE_FIELDS, RARE_S)
    batches = (fast, slow, rare)

    def lacks(number: int) -> bool:
        return any(number in batch.unsupported for batch in batches)

    readers = (
        *(batch.reader for batch in batches),
        *fast_readers(busy_samples),
        *slow_readers(fans),
        *static_readers(),
        *field_substitutes(energy_samples),
    )
    return readers, lacks


def _nvlink_state(link: int) -> Read:
    key = key_of("nvlink_link_up", str(link))
    return lambda handle: {key: pynvml.nvmlDeviceGetNvLinkState(handle, link)}


def _power_limit_range(handle: Any) -> Values:
    lowest_mw, highest_mw = pynvml.nvmlDeviceGetPowerManagementLimitConstraints(handle)
    return {
        key_of("power_limit_min_watts"): lowest_mw / 1000,
        key_of("power_limit_max_watts"): highest_mw / 1000,
    }


_power = value_of(key_of("power_watts"), pynvml.nvmlDeviceGetPowerUsage, divisor=1000)
_power_limit = value_of(
    key_of("power_limit_watts"), pynvml.nvmlDeviceGetEnforcedPowerLimit, divisor=1000
)
_power_limit_default = value_of(
    key_of("power_limit_default_watts"),
    pynvml.nvmlDeviceGetPowerManagementDefaultLimit,
    divisor=1000,
)


@dataclass(slots=True, eq=False)
class _Turn:
    """A reader and its state; ``rounds`` is 0 if it runs only once."""

    reader: TimedReader
    phase: int
    rounds: int
    values: Values = field(default_factory=dict)

    def due(self, round_number: int) -> bool:
        if self.rounds == 1 or round_number == 0:
            return True
        return self.rounds > 0 and (round_number + self.phase) % self.rounds == 0


class ReaderSchedule:
    """The readers of one device, with rounds of ``interval_s``, while its handle is valid.

    ``lacks`` returns whether the device lacks a field. ``denied`` has the readers already reported
    as not permitted.
    """

    def __init__(
        self,
        readers: Iterable[TimedReader],
        phase: int,
        costs: CallCosts,
        lacks: Callable[[int], bool],
        denied: set[str],
        interval_s: float,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._monotonic = monotonic
        self._interval_s = interval_s
        self._turns = [
            _Turn(r, phase + i, 0 if r.period_s == ONCE else self._rounds(r.period_s))
            for i, r in enumerate(readers)
        ]
        self._costs = costs
        self._lacks = lacks
        self._denied = denied
        self._refused: set[str] = set()
        self._round = 0
        # The newest values of the slow readers.
        self._standing: Values = {}

    def read(self, handle: Any) -> Values:
        """Return all values of this round. Raises DeviceGone if no due reader has any."""
        fast: Values = {}
        outcomes: list[Meaning | None] = []
        for turn in tuple(self._turns):
            number = turn.reader.instead_of
            if turn.due(self._round) and (not number or self._lacks(number)):
                outcomes.append(self._run(turn, handle, fast))
        self._round += 1
        if len(outcomes) > 1 and None not in outcomes:
            refused = Meaning.NO_PERMISSION in outcomes
            raise DeviceGone(reason_of(Meaning.NO_PERMISSION if refused else Meaning.UNKNOWN))
        self._report_denied()
        return self._standing | fast

    def has(self, name: str) -> bool:
        """Return whether a reader of this name is left."""
        return any(turn.reader.name == name for turn in self._turns)

    def _rounds(self, period_s: float) -> int:
        return rounds_of(period_s, self._interval_s)

    def _run(self, turn: _Turn, handle: Any, fast: Values) -> Meaning | None:
        """Store the values of a reader, or return why there are none."""
        reader = turn.reader
        begun = self._monotonic()
        try:
            values = reader.read(handle)
        except pynvml.NVMLError as error:
            self._costs.add(reader.name, reader.calls, self._monotonic() - begun)
            return self._failed(turn, error)
        self._costs.add(reader.name, reader.calls, self._monotonic() - begun)
        for code in reader.refusals:
            self._costs.add_error(reader.name, code)
            if meaning_of(code) is Meaning.NO_PERMISSION:
                self._refused.add(f"some of {reader.name}")
        if turn.rounds == 1:
            fast.update(values)
        else:
            self._stand(turn, values)
        return None

    def _stand(self, turn: _Turn, values: Values) -> None:
        for key in turn.values:
            self._standing.pop(key, None)
        turn.values = values
        self._standing.update(values)

    def _failed(self, turn: _Turn, error: pynvml.NVMLError) -> Meaning:
        """Drop a reader that will never work; any other is repeated."""
        self._costs.add_error(turn.reader.name, code_of(error))
        meaning = classify(error)
        self._stand(turn, {})
        if meaning is Meaning.NO_PERMISSION:
            self._refused.add(turn.reader.name)
        if meaning in (Meaning.UNSUPPORTED, Meaning.NO_PERMISSION):
            self._turns.remove(turn)
        elif turn.rounds == 0:
            turn.rounds = self._rounds(RARE_S)
        return meaning

    def _report_denied(self) -> None:
        """Log a denied reader once, but not if the whole device is denied."""
        new = self._refused - self._denied
        if new:
            self._denied |= new
            logger.warning("not permitted, so not read: %s", ", ".join(sorted(new)))
