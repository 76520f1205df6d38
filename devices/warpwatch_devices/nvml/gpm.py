"""Reads GPM through NVML: the hardware counters of Hopper and newer devices.

Each GPU's loop reads its counters and those of its GPU instances, one GPU at a time, because
parallel calls have crashed drivers. A reading costs one sample and one evaluation.

Identifiers and units are those of nvml.h: shares in per cent, traffic in MiB/s. NVML evaluates the
time between two samples, with a return code per metric.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import math
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import pynvml

from warpwatch_devices.nvml.library import CallCosts, Meaning, classify, meaning_of
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


READER = "gpm"
# The driver refreshes the counters every 100 ms (nvml.h); over long windows they may wrap.
MIN_WINDOW_S = 0.1
MAX_WINDOW_S = 600.0
# Values expire after this many intervals.
FRESH_INTERVALS = 3
# A GPU waits this long for the others; eight need some 10 ms.
MAX_WAIT_S = 0.2

_NO_PERMISSION = (
    "GPM of device %s may not be read: the driver restricts profiling to administrators; load the "
    "nvidia module with NVreg_RestrictProfilingToAdminUsers=0 (RmProfilingAdminOnly: 0 in "
    "/proc/driver/nvidia/params) or give the daemon CAP_SYS_ADMIN"
)


class _GpmTurn:
    """A lock, and the GPU that holds it. ``ended``: the others do not wait for it any more."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.gpu = ""
        self.ended = False


class GpmTurns:
    """Lets the GPUs of one NVML session read their counters one at a time."""

    def __init__(self) -> None:
        self._turn = _GpmTurn()
        self._warned = False

    @contextlib.contextmanager
    def turn(self, gpu: str) -> Iterator[_GpmTurn | None]:
        """Yield the turn, or None if another GPU has it for too long."""
        turn = self._turn
        if not turn.lock.acquire(timeout=MAX_WAIT_S):
            yield None
            return
        turn.gpu = gpu
        try:
            yield turn
        finally:
            turn.gpu = ""
            turn.lock.release()

    def end(self, gpu: str) -> None:
        """Let the others read without this GPU, whose call does not return."""
        if self._turn.gpu == gpu:
            self._turn.ended = True
            self._turn = _GpmTurn()

    def warn(self, gpu: str) -> None:
        """Log once that profiling is not permitted."""
        if not self._warned:
            self._warned = True
            logger.warning(_NO_PERMISSION, gpu)


class Gpm:
    """The counters of one GPU or GPU instance, for the loop of that GPU.

    ``handle`` is the GPU's; with ``gpu_instance`` this instance is read through it.
    """

    def __init__(
        self,
        turns: GpmTurns,
        costs: CallCosts,
        interval_s: float,
        monotonic: Callable[[], float],
        gpu: str,
        handle: Any,
        gpu_instance: int | None = None,
    ) -> None:
        self._handle = handle
        # Whether it may have values.
        self.supported = True
        self._turns = turns
        self._costs = costs
        self._max_age_s = FRESH_INTERVALS * interval_s
        self._monotonic = monotonic
        self._gpu = gpu
        self._gpu_instance = gpu_instance
        self._request: GpmRequest | None = None
        # The sample of the time ``_sampled_at``, and the buffer of the next one.
        self._earlier: Any = None
        self._spare: Any = None
        self._sampled_at: float | None = None
        self._traffic_bytes: dict[str, float] = {}
        self._values: Values = {}
        self._read_at = 0.0

    def read(self) -> Values:
        """Return the newest values, or none if they are too old. Raises LibraryGone, DeviceGone."""
        before = self._sampled_at
        if self.supported and (before is None or self._monotonic() - before >= MIN_WINDOW_S):
            with self._turns.turn(self._gpu) as turn:
                if turn is not None:
                    self._poll(turn)
        fresh = self._monotonic() - self._read_at <= self._max_age_s
        return self._values if fresh else {}

    def close(self) -> None:
        """Free the buffers."""
        buffers = [buffer for buffer in (self._earlier, self._spare) if buffer is not None]
        self._earlier = self._spare = None
        for buffer in buffers:
            with contextlib.suppress(pynvml.NVMLError):
                pynvml.nvmlGpmSampleFree(buffer)

    def _poll(self, turn: _GpmTurn) -> None:
        try:
            if self._request is None:
                self._request = self._prepare(turn)
            if self._request is None:
                self.supported = False
            else:
                self._sample(turn, self._request)
        except pynvml.NVMLError as error:
            self._refused(classify(error))

    def _prepare(self, turn: _GpmTurn) -> GpmRequest | None:
        """Return the request, or None without GPM."""
        support = self._call(turn, pynvml.nvmlGpmQueryDeviceSupport, self._handle)
        if not support.isSupportedDevice:
            return None
        self._earlier = self._earlier or self._call(turn, pynvml.nvmlGpmSampleAlloc)
        self._spare = self._spare or self._call(turn, pynvml.nvmlGpmSampleAlloc)
        return GpmRequest()

    def _call(self, turn: _GpmTurn, call: Callable[..., Any], *arguments: Any) -> Any:
        """Call NVML. Raises NVMLError, also after a call that has returned too late."""
        if turn.ended:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_TIMEOUT)
        return self._costs.measure(READER, call, *arguments)

    def _sample(self, turn: _GpmTurn, request: GpmRequest) -> None:
        """Take a sample, and evaluate the time since the last one."""
        if self._gpu_instance is None:
            self._call(turn, pynvml.nvmlGpmSampleGet, self._handle, self._spare)
        else:
            instance = (self._handle, self._gpu_instance, self._spare)
            self._call(turn, pynvml.nvmlGpmMigSampleGet, *instance)
        before, now = self._sampled_at, self._monotonic()
        self._sampled_at = now
        self._earlier, self._spare = self._spare, self._earlier
        if before is None or now - before > MAX_WINDOW_S:
            return
        # Since the exchange of the buffers the spare one holds the older sample.
        argument = request.between(self._spare, self._earlier)
        self._call(turn, pynvml.nvmlGpmMetricsGet, argument)
        answers = request.answers()
        denied = refused(answers)
        request.drop(denied)
        if not request.metrics:
            forbidden = Meaning.NO_PERMISSION in denied.values()
            self._refused(Meaning.NO_PERMISSION if forbidden else Meaning.UNSUPPORTED)
            return
        self._values, self._read_at = self._series(answers, now - before), now

    def _series(self, answers: list[Answer], window_s: float) -> Values:
        values: Values = dict(shares_of(answers))
        for name, rate in traffic_of(answers).items():
            total = self._traffic_bytes.get(name, 0.0) + rate * window_s
            self._traffic_bytes[name] = total
            values[f"{name}_bytes_per_second", ()] = round(rate)
        for name, total in self._traffic_bytes.items():
            values[f"{name}_bytes_total", ()] = round(total)
        return values

    def _refused(self, meaning: Meaning) -> None:
        """Stop reading a device that will never answer; any other error is repeated."""
        if meaning in (Meaning.UNSUPPORTED, Meaning.NO_PERMISSION):
            self.supported = False
        if meaning is Meaning.NO_PERMISSION:
            self._turns.warn(self._gpu)
