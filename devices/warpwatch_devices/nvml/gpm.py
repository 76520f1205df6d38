"""Reads GPM through NVML: the hardware counters of Hopper and newer devices.

One thread reads all devices in turn, because parallel calls have crashed drivers. A GPU whose call
does not return blocks that thread; another one then reads the other GPUs, and takes the GPU back
some time after its call has returned. A round costs one sample and one evaluation per device.

Identifiers and units are those of nvml.h: shares in per cent, traffic in MiB/s. NVML evaluates the
time between two samples, with a return code per metric.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import math
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pynvml

from warpwatch_devices.nvml.library import CallCosts, Meaning, address_of, code_of, meaning_of
from warpwatch_runtime.call_guard import CallGuard, GuardedLoop
from warpwatch_runtime.supervisor import LoopRunner
from warpwatch_telemetry.metric import SeriesKey, Values

logger = logging.getLogger(__name__)

# A share up to this much above 1 is rounding; a larger one is invalid.
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
    """The metrics requested of one device, in a structure that is built once."""

    def __init__(self) -> None:
        self.metrics: tuple[int, ...] = ()
        self._request = pynvml.c_nvmlGpmMetricsGet_t()
        self._request.version = pynvml.NVML_GPM_METRICS_GET_VERSION
        self._answers = memoryview(self._request.metrics).cast("B")
        self._ask((*SHARES, *TRAFFIC))

    def between(self, earlier: Any, later: Any) -> Any:
        """Return the argument of nvmlGpmMetricsGet for the time between two samples."""
        self._request.sample1 = earlier
        self._request.sample2 = later
        return self._request

    def answers(self) -> list[Answer]:
        return list(_METRIC.iter_unpack(self._answers[: len(self.metrics) * _METRIC_BYTES]))

    def drop(self, refused: Iterable[int]) -> None:
        """Do not request these metrics again."""
        gone = frozenset(refused)
        if gone:
            self._ask(tuple(metric for metric in self.metrics if metric not in gone))

    def _ask(self, metrics: tuple[int, ...]) -> None:
        self.metrics = metrics
        self._request.numMetrics = len(metrics)
        for place, metric in enumerate(metrics):
            self._request.metrics[place].metricId = metric


def refused(answers: Iterable[Answer]) -> dict[int, Meaning]:
    """Return the metrics that the device will never answer, and the reasons."""
    meanings = {metric: meaning_of(code) for metric, code, _ in answers if code}
    final = (Meaning.UNSUPPORTED, Meaning.NO_PERMISSION)
    return {metric: meaning for metric, meaning in meanings.items() if meaning in final}


def shares_of(answers: Iterable[Answer]) -> dict[SeriesKey, float]:
    """Return ratios from 0 to 1; invalid values are absent."""
    values = {}
    for metric, code, percent in answers:
        key = SHARES.get(metric)
        if key is None or code or not -ROUNDING_RATIO <= percent / 100 <= 1 + ROUNDING_RATIO:
            continue
        values[key] = round(min(max(percent / 100, 0.0), 1.0), 6)
    return values


def traffic_of(answers: Iterable[Answer]) -> dict[str, float]:
    """Return bytes per second by the beginning of the series' name."""
    return {
        TRAFFIC[metric]: rate * _BYTES_PER_MIB
        for metric, code, rate in answers
        if metric in TRAFFIC and not code and math.isfinite(rate) and rate >= 0
    }


@dataclass(slots=True, eq=False)
class GpmDevice:
    """A GPU or GPU instance; ``physical`` is the GPU that its calls reach.

    ``earlier`` holds the sample of the time ``sampled_at``; ``spare`` takes the next one.
    """

    uuid: str
    handle: Any
    gpu_instance: int | None
    physical: int
    request: GpmRequest | None = None
    earlier: Any = None
    spare: Any = None
    sampled_at: float | None = None
    polled: bool = True
    retry_at: float = 0.0
    traffic_bytes: dict[str, float] = field(default_factory=dict)
    values: Values = field(default_factory=dict)
    read_at: float = 0.0

    @property
    def buffers(self) -> tuple[Any, ...]:
        return tuple(buffer for buffer in (self.earlier, self.spare) if buffer is not None)


@dataclass(slots=True, eq=False)
class GivenUp:
    """A GPU whose call did not return.

    ``names``: it and its instances; ``devices``: those to be read again; ``times``: how often this
    happened; ``back_at``: the time to read again.
    """

    times: int = 0
    guard: CallGuard | None = None
    names: set[str] = field(default_factory=set)
    devices: dict[str, GpmDevice] = field(default_factory=dict)
    back_at: float | None = None

    def due(self, now: float, at_most: int, after_s: float) -> bool:
        """Return whether the call has returned long enough ago to read the GPU again.

        The pause doubles each time; after ``at_most`` times the GPU is never read again.
        """
        if self.guard is None or self.guard.in_flight or self.times > at_most:
            return False
        if self.back_at is None:
            self.back_at = now + after_s * 2 ** (self.times - 1)
        return now >= self.back_at


READER = "gpm"
# The driver refreshes the counters every 100 ms (nvml.h); over long windows they may wrap.
MIN_WINDOW_S = 0.1
MAX_WINDOW_S = 600.0
# With a shorter interval the window would be too short in every other round.
MIN_INTERVAL_S = 0.12
# Values expire after this many intervals.
FRESH_INTERVALS = 3
# A lost device is not called for this time.
LOST_RETRY_S = 10.0
# A GPU whose call has returned is read again after this pause, which doubles each time.
TAKE_BACK_AFTER_S = 10.0
MAX_TAKEN_BACK = 3
# The longest wait of ``close`` for a call to return.
CLOSE_TIMEOUT_S = 0.5

_NO_PERMISSION = (
    "GPM of device %s may not be read: the driver restricts profiling to administrators; load the "
    "nvidia module with NVreg_RestrictProfilingToAdminUsers=0 (RmProfilingAdminOnly: 0 in "
    "/proc/driver/nvidia/params) or give the daemon CAP_SYS_ADMIN"
)


class GpmWorker:
    """The GPM of all devices of one NVML session. Only the worker's thread calls NVML."""

    def __init__(
        self,
        supervisor: LoopRunner,
        interval_s: float,
        stuck_after_s: float,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._monotonic = monotonic
        self.costs = CallCosts()
        self._interval_s = max(interval_s, MIN_INTERVAL_S)
        # The limit is per GPU instead: one that was given up too often is not read again.
        loop = (supervisor, "gpm", self._interval_s, self._round, sys.maxsize)
        self._loop = GuardedLoop(*loop, monotonic)
        self._stuck_after_s = stuck_after_s
        self._lock = threading.Lock()
        self._devices: dict[str, GpmDevice] = {}
        self._removed: list[GpmDevice] = []
        # By GPU. One that is read again stays here, without a guard.
        self._given_up: dict[int, GivenUp] = {}
        self._closed = False
        self._warned = False

    def add(
        self, uuid: str, handle: Any, gpu_instance: int | None = None, parent_handle: Any = None
    ) -> None:
        """Read this device from now on; a known one starts again.

        A GPU instance is read through ``parent_handle``. Devices of a stuck GPU wait until it is
        read again.
        """
        asked = handle if parent_handle is None else parent_handle
        device = GpmDevice(uuid, asked, gpu_instance, address_of(asked))
        with self._lock:
            if self._closed:
                return
            given_up = self._given_up.get(device.physical)
            if given_up is not None and given_up.guard is not None:
                given_up.names.add(uuid)
                given_up.devices[uuid] = device
                return
            self._drop(uuid)
            self._devices[uuid] = device
            self._loop.begin()

    def remove(self, uuid: str) -> None:
        with self._lock:
            self._drop(uuid)
            for given_up in self._given_up.values():
                given_up.devices.pop(uuid, None)

    def values(self, uuid: str) -> Values:
        """Return the last values, or none if they are too old."""
        with self._lock:
            device = self._devices.get(uuid)
            if device is None:
                return {}
            age_s = self._monotonic() - device.read_at
            return dict(device.values) if age_s <= FRESH_INTERVALS * self._interval_s else {}

    @property
    def given_up(self) -> frozenset[str]:
        """Devices whose call did not return, and which are not read again."""
        with self._lock:
            every = (given_up for given_up in self._given_up.values() if given_up.guard is not None)
            return frozenset(uuid for given_up in every for uuid in given_up.names)

    @property
    def in_flight(self) -> bool:
        """Whether a call is inside NVML."""
        return self._loop.in_flight

    def watch(self) -> None:
        """Replace the worker if its call does not return. Never calls NVML."""
        guard = self._loop.guard
        stuck = self._loop.give_up_if_stuck(self._stuck_after_s)
        if isinstance(stuck, GpmDevice):
            self._give_up(guard, stuck)
        self._take_back()

    def _give_up(self, guard: CallGuard, stuck: GpmDevice) -> None:
        with self._lock:
            given_up = self._given_up.setdefault(stuck.physical, GivenUp())
            given_up.times += 1
            given_up.guard, given_up.back_at = guard, None
            given_up.names = {stuck.uuid}
            for device in list(self._devices.values()):
                if device.physical == stuck.physical:
                    given_up.names.add(device.uuid)
                    given_up.devices[device.uuid] = self._devices.pop(device.uuid)
            # The call may still write into the buffers of a device that was removed meanwhile.
            self._removed = [old for old in self._removed if old.physical != stuck.physical]
            self._loop.begin()
        for_good = given_up.times > MAX_TAKEN_BACK
        until = "until NVML is restarted" if for_good else "until it does"
        logger.error("GPM of device %s does not return: given up %s", stuck.uuid, until)

    def _take_back(self) -> None:
        """Read GPUs again whose call returned some time ago; their counters continue."""
        now = self._monotonic()
        with self._lock:
            for given_up in self._given_up.values():
                if self._closed or not given_up.due(now, MAX_TAKEN_BACK, TAKE_BACK_AFTER_S):
                    continue
                for old in given_up.devices.values():
                    new = GpmDevice(old.uuid, old.handle, old.gpu_instance, old.physical)
                    new.traffic_bytes = old.traffic_bytes
                    self._devices[old.uuid] = new
                    self._removed.append(old)
                    logger.info("GPM of device %s is read again", old.uuid)
                given_up.guard, given_up.devices = None, {}

    def close(self) -> None:
        """Free the buffers, unless a call may still use them."""
        with self._lock:
            self._closed = True
        if not self._loop.close(CLOSE_TIMEOUT_S):
            return
        with self._lock:
            devices = [*self._devices.values(), *self._removed]
            self._devices, self._removed = {}, []
        for device in devices:
            for buffer in device.buffers:
                with contextlib.suppress(pynvml.NVMLError):
                    pynvml.nvmlGpmSampleFree(buffer)

    def _drop(self, uuid: str) -> None:
        device = self._devices.pop(uuid, None)
        if device is not None:
            self._removed.append(device)

    def _round(self, guard: CallGuard) -> None:
        with self._lock:
            devices = list(self._devices.values())
            removed, self._removed = self._removed, []
        for device in removed:
            self._free(guard, device)
        now = self._monotonic()
        for device in devices:
            if device.polled and now >= device.retry_at and self._known(device):
                self._poll(guard, device)

    def _known(self, device: GpmDevice) -> bool:
        """Return whether the device was not removed while others were read."""
        return self._devices.get(device.uuid) is device

    def _free(self, guard: CallGuard, device: GpmDevice) -> None:
        for buffer in device.buffers:
            with contextlib.suppress(pynvml.NVMLError):
                self._call(guard, device, pynvml.nvmlGpmSampleFree, buffer)

    def _call(self, guard: CallGuard, device: GpmDevice, *call: Any) -> Any:
        """Call NVML once for the device. Raises NVMLError and CallAbandoned."""
        return guard.call(device, self.costs.measure, READER, *call)

    def _poll(self, guard: CallGuard, device: GpmDevice) -> None:
        try:
            if device.request is None and not self._prepare(guard, device):
                device.polled = False
                return
            self._read(guard, device)
        except pynvml.NVMLError as error:
            self._judge(device, meaning_of(code_of(error)))

    def _prepare(self, guard: CallGuard, device: GpmDevice) -> bool:
        """Return whether the device has GPM; then its buffers exist."""
        support = self._call(guard, device, pynvml.nvmlGpmQueryDeviceSupport, device.handle)
        if not support.isSupportedDevice:
            return False
        device.earlier = device.earlier or self._call(guard, device, pynvml.nvmlGpmSampleAlloc)
        device.spare = device.spare or self._call(guard, device, pynvml.nvmlGpmSampleAlloc)
        device.request = GpmRequest()
        return True

    def _read(self, guard: CallGuard, device: GpmDevice) -> None:
        """Take a sample, and evaluate the time since the last one."""
        before = device.sampled_at
        if before is not None and self._monotonic() - before < MIN_WINDOW_S:
            return
        if device.gpu_instance is None:
            self._call(guard, device, pynvml.nvmlGpmSampleGet, device.handle, device.spare)
        else:
            instance = (device.handle, device.gpu_instance, device.spare)
            self._call(guard, device, pynvml.nvmlGpmMigSampleGet, *instance)
        device.sampled_at = now = self._monotonic()
        device.earlier, device.spare = device.spare, device.earlier
        if before is not None and now - before <= MAX_WINDOW_S:
            self._evaluate(guard, device, now - before)

    def _evaluate(self, guard: CallGuard, device: GpmDevice, window_s: float) -> None:
        request = device.request
        assert request is not None
        # Since the exchange of the buffers the spare one holds the older sample.
        argument = request.between(device.spare, device.earlier)
        self._call(guard, device, pynvml.nvmlGpmMetricsGet, argument)
        answers = request.answers()
        denied = refused(answers)
        request.drop(denied)
        if not request.metrics:
            forbidden = Meaning.NO_PERMISSION in denied.values()
            self._judge(device, Meaning.NO_PERMISSION if forbidden else Meaning.UNSUPPORTED)
            return
        values = shares_of(answers)
        for name, rate in traffic_of(answers).items():
            total = device.traffic_bytes.get(name, 0.0) + rate * window_s
            device.traffic_bytes[name] = total
            values[f"{name}_bytes_per_second", ()] = round(rate)
        for name, total in device.traffic_bytes.items():
            values[f"{name}_bytes_total", ()] = round(total)
        with self._lock:
            device.values, device.read_at = values, self._monotonic()

    def _judge(self, device: GpmDevice, meaning: Meaning) -> None:
        """Decide by an error whether to read the device again at once, later, or never."""
        if meaning in (Meaning.UNSUPPORTED, Meaning.NO_PERMISSION, Meaning.LIBRARY):
            device.polled = False
        elif meaning in (Meaning.LOST, Meaning.RESET_REQUIRED):
            device.retry_at = self._monotonic() + LOST_RETRY_S
            device.sampled_at = None
        if meaning is Meaning.NO_PERMISSION and not self._warned:
            self._warned = True
            logger.warning(_NO_PERMISSION, device.uuid)
