"""NVML as these checks call it: raw, timed, and also without root's rights."""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pynvml

from warpwatch_devices.nvml.library import code_of, initialise, name_of, shut_down

NOBODY = 65534
_TYPES = {
    pynvml.NVML_VALUE_TYPE_DOUBLE: ("double", "dVal"),
    pynvml.NVML_VALUE_TYPE_UNSIGNED_INT: ("uint32", "uiVal"),
    pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG: ("ulong", "ulVal"),
    pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG: ("uint64", "ullVal"),
    pynvml.NVML_VALUE_TYPE_SIGNED_LONG_LONG: ("int64", "sllVal"),
    pynvml.NVML_VALUE_TYPE_SIGNED_INT: ("int32", "siVal"),
    pynvml.NVML_VALUE_TYPE_UNSIGNED_SHORT: ("uint16", "usVal"),
}


@contextlib.contextmanager
def first_gpu() -> Iterator[Any]:
    """The handle of index 0. Raises NvmlUnavailable, NVMLError."""
    initialise()
    try:
        yield pynvml.nvmlDeviceGetHandleByIndex(0)
    finally:
        shut_down()


def code_text(code: int) -> str:
    return "success" if code == pynvml.NVML_SUCCESS else name_of(code)


def code_name(error: Exception) -> str:
    return code_text(code_of(error))


def read_fields(handle: Any, numbers: Sequence[int | tuple[int, int]]) -> list[dict[str, Any]]:
    """Fields in one call, each with its code, type, value, driver's time (µs) and latency (µs)."""
    answers = pynvml.nvmlDeviceGetFieldValues(handle, list(numbers))
    return [_field(answer) for answer in answers]


def _field(answer: Any) -> dict[str, Any]:
    if answer.nvmlReturn != pynvml.NVML_SUCCESS:
        return {"field": answer.fieldId, "code": code_text(answer.nvmlReturn)}
    kind, member = _TYPES.get(answer.valueType, (str(answer.valueType), "ullVal"))
    value = getattr(answer.value, member)
    return {
        "field": answer.fieldId,
        "code": "success",
        "type": kind,
        "value": value if math.isfinite(value) else None,
        "time_us": answer.timestamp,
        "latency_us": answer.latencyUsec,
    }


def time_call(call: Callable[[], Any], count: int, dear_count: int) -> dict[str, Any]:
    """What a call costs in µs, ctypes included; ``dear_count`` readings where it takes over 5 ms.

    Raises NVMLError.
    """
    began = time.perf_counter()
    call()
    first_us = (time.perf_counter() - began) * 1e6
    times_us = []
    for _ in range(dear_count if first_us > 5000 else count):
        began = time.perf_counter()
        call()
        times_us.append((time.perf_counter() - began) * 1e6)
    return {"first_us": round(first_us, 1), **distribution(times_us)}


def distribution(times_us: list[float]) -> dict[str, Any]:
    ordered = sorted(times_us)
    return {
        "n": len(ordered),
        "p50_us": round(statistics.median(ordered), 1),
        "p99_us": round(ordered[min(len(ordered) - 1, math.ceil(0.99 * len(ordered)) - 1)], 1),
        "max_us": round(ordered[-1], 1),
    }


# --- GPM ---


class GpmSamples:
    """Two samples of a GPU; ``metrics`` answers for the time between them."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle
        self._samples = [pynvml.nvmlGpmSampleAlloc() for _ in range(2)]

    def close(self) -> None:
        for sample in self._samples:
            pynvml.nvmlGpmSampleFree(sample)

    def take(self) -> None:
        """The older of the two is replaced."""
        self._samples.reverse()
        pynvml.nvmlGpmSampleGet(self._handle, self._samples[1])

    def metrics(self, numbers: Sequence[int]) -> dict[int, tuple[str, float | None]]:
        """(return code, value) by number; shares in per cent, traffic in MiB/s."""
        request = pynvml.c_nvmlGpmMetricsGet_t()
        request.version = pynvml.NVML_GPM_METRICS_GET_VERSION
        request.sample1, request.sample2 = self._samples
        request.numMetrics = len(numbers)
        for place, number in enumerate(numbers):
            request.metrics[place].metricId = number
        pynvml.nvmlGpmMetricsGet(request)
        return {number: _gpm(request.metrics[i]) for i, number in enumerate(numbers)}


def _gpm(metric: Any) -> tuple[str, float | None]:
    good = metric.nvmlReturn == pynvml.NVML_SUCCESS and math.isfinite(metric.value)
    return code_text(metric.nvmlReturn), round(metric.value, 4) if good else None


@contextlib.contextmanager
def gpm_samples(handle: Any) -> Iterator[GpmSamples]:
    samples = GpmSamples(handle)
    try:
        yield samples
    finally:
        samples.close()


# --- another user ---


def as_nobody(measure: Callable[[], Any]) -> Any:
    """What ``measure`` returns in a child without root's rights. NVML must not be loaded yet.

    Raises RuntimeError with what it said.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        _answer_as_nobody(measure, writer)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    answer = json.loads(text or b'{"error": "the child ended without an answer"}')
    if "error" in answer:
        raise RuntimeError(answer["error"])
    return answer["value"]


def _answer_as_nobody(measure: Callable[[], Any], writer: int) -> None:
    try:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
        # After a change of user the kernel hides /proc/self, which some drivers read.
        ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)
        answer = {"value": measure()}
    except BaseException as error:
        answer = {"error": f"{type(error).__name__}: {error}"}
    os.write(writer, json.dumps(answer).encode())
    os._exit(0)
