"""What NVML is asked about a GPU: one call, or a few that belong together, for each fact.

The order is fixed, so that the first question without an answer is the call that does not return.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any

import pynvml

from warpwatch_devices.nvml import library

Question = Callable[[Any], Any]

# A GPU has at most 7 today.
_MOST_INSTANCES = 64
# Parallel calls of GPM have crashed drivers.
_GPM = threading.Lock()
_GPM_WAIT_S = 2.0


def _memory(handle: Any) -> list[int]:
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    return [memory.used, memory.total]


def _slowdown(handle: Any) -> int:
    threshold = pynvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN
    return int(pynvml.nvmlDeviceGetTemperatureThreshold(handle, threshold))


def _uncorrected(counter: int) -> Question:
    kind = pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED
    return lambda handle: pynvml.nvmlDeviceGetTotalEccErrors(handle, kind, counter)


def _field(field_id: int) -> Question:
    def ask(handle: Any) -> int:
        (answer,) = pynvml.nvmlDeviceGetFieldValues(handle, [field_id])
        if answer.nvmlReturn != pynvml.NVML_SUCCESS:
            raise pynvml.NVMLError(answer.nvmlReturn)
        return int(answer.value.uiVal)

    return ask


def _clock_events(handle: Any) -> int:
    try:
        return int(pynvml.nvmlDeviceGetCurrentClocksEventReasons(handle))
    except pynvml.NVMLError_FunctionNotFound:
        # Its name before driver 535.
        return int(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))


def _pcie(handle: Any) -> list[int]:
    generation = pynvml.nvmlDeviceGetCurrPcieLinkGeneration(handle)
    return [generation, pynvml.nvmlDeviceGetCurrPcieLinkWidth(handle)]


def _max_pcie(handle: Any) -> list[int]:
    generation = pynvml.nvmlDeviceGetMaxPcieLinkGeneration(handle)
    return [generation, pynvml.nvmlDeviceGetMaxPcieLinkWidth(handle)]


def _mig_instances(handle: Any) -> list[str]:
    names = []
    for index in range(min(pynvml.nvmlDeviceGetMaxMigDeviceCount(handle), _MOST_INSTANCES)):
        try:
            instance = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)
        except (pynvml.NVMLError_NotFound, pynvml.NVMLError_InvalidArgument):
            continue  # an empty slot: the indices are sparse
        names.append(str(pynvml.nvmlDeviceGetName(instance)))
    return names


def _nvlinks(handle: Any) -> list[list[Any]]:
    return [_nvlink(handle, link) for link in range(_nvlink_count(handle))]


def _nvlink_count(handle: Any) -> int:
    try:
        count = _field(pynvml.NVML_FI_DEV_NVLINK_LINK_COUNT)(handle)
    except pynvml.NVMLError:
        pynvml.nvmlDeviceGetNvLinkState(handle, 0)
        count = pynvml.NVML_NVLINK_MAX_LINKS
    return int(min(count, pynvml.NVML_NVLINK_MAX_LINKS))


def _nvlink(handle: Any, link: int) -> list[Any]:
    state = _or_none(pynvml.nvmlDeviceGetNvLinkState, handle, link)
    if state != pynvml.NVML_FEATURE_ENABLED:
        return [None if state is None else False, None, None]
    remote_type = _or_none(pynvml.nvmlDeviceGetNvLinkRemoteDeviceType, handle, link)
    remote = _or_none(pynvml.nvmlDeviceGetNvLinkRemotePciInfo, handle, link)
    return [True, remote_type, remote.busId if remote else None]


def _or_none(call: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return call(*arguments)
    except pynvml.NVMLError as error:
        if library.meaning_of(error.value) is library.Meaning.LOST:
            raise
        return None


def _fabric(handle: Any) -> list[int]:
    info = pynvml.c_nvmlGpuFabricInfoV_t()
    try:
        pynvml.nvmlDeviceGetGpuFabricInfoV(handle, ctypes.byref(info))
    except pynvml.NVMLError_FunctionNotFound:
        info = pynvml.c_nvmlGpuFabricInfo_t()
        pynvml.nvmlDeviceGetGpuFabricInfo(handle, ctypes.byref(info))
    return [info.state, info.status, getattr(info, "healthMask", 0)]


def _gpm(handle: Any) -> bool:
    return bool(pynvml.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice)


def _gpm_sample(handle: Any) -> bool | None:
    """Whether a sample may be taken: the only sure way to know is to take one."""
    if not _gpm(handle) or not _GPM.acquire(timeout=_GPM_WAIT_S):
        return None
    try:
        sample = pynvml.nvmlGpmSampleAlloc()
        try:
            pynvml.nvmlGpmSampleGet(handle, sample)
        finally:
            pynvml.nvmlGpmSampleFree(sample)
    finally:
        _GPM.release()
    return True


QUESTIONS: dict[str, Question] = {
    "name": pynvml.nvmlDeviceGetName,
    "uuid": pynvml.nvmlDeviceGetUUID,
    "bus_id": lambda handle: pynvml.nvmlDeviceGetPciInfo(handle).busId,
    "minor": pynvml.nvmlDeviceGetMinorNumber,
    "memory": _memory,
    "busy_percent": lambda handle: pynvml.nvmlDeviceGetUtilizationRates(handle).gpu,
    "temperature": lambda handle: pynvml.nvmlDeviceGetTemperature(
        handle, pynvml.NVML_TEMPERATURE_GPU
    ),
    "temperature_margin": pynvml.nvmlDeviceGetMarginTemperature,
    "slowdown_temperature": _slowdown,
    "power_mw": pynvml.nvmlDeviceGetPowerUsage,
    "power_limit_mw": pynvml.nvmlDeviceGetPowerManagementLimit,
    "default_power_limit_mw": pynvml.nvmlDeviceGetPowerManagementDefaultLimit,
    "mig_mode": pynvml.nvmlDeviceGetMigMode,
    "mig_instances": _mig_instances,
    "persistence_mode": pynvml.nvmlDeviceGetPersistenceMode,
    "ecc_mode": pynvml.nvmlDeviceGetEccMode,
    "compute_mode": pynvml.nvmlDeviceGetComputeMode,
    "remapped_rows": pynvml.nvmlDeviceGetRemappedRows,
    "retired_pages_pending": pynvml.nvmlDeviceGetRetiredPagesPendingStatus,
    "uncorrected_volatile": _uncorrected(pynvml.NVML_VOLATILE_ECC),
    "uncorrected_aggregate": _uncorrected(pynvml.NVML_AGGREGATE_ECC),
    "recovery_action": _field(pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION),
    "clock_event_reasons": _clock_events,
    "pcie": _pcie,
    "max_pcie": _max_pcie,
    "processes": lambda handle: [
        process.pid for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
    ],
    "nvlinks": _nvlinks,
    "fabric": _fabric,
    "gpm": _gpm,
    "gpm_sample": _gpm_sample,
}
