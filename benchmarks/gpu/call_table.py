"""The NVML calls that are timed: those that the daemon makes, and their neighbours."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pynvml

Call = Callable[[Any], Any]

# Of pynvml, with the handle as their only argument.
_OF_THE_HANDLE = (
    "UtilizationRates",
    "MemoryInfo",
    "BAR1MemoryInfo",
    "PowerUsage",
    "TotalEnergyConsumption",
    "EnforcedPowerLimit",
    "PowerManagementLimit",
    "PowerManagementDefaultLimit",
    "PowerManagementLimitConstraints",
    "PerformanceState",
    "CurrentClocksEventReasons",
    "SupportedClocksEventReasons",
    "MarginTemperature",
    "EncoderUtilization",
    "DecoderUtilization",
    "JpgUtilization",
    "OfaUtilization",
    "CurrPcieLinkGeneration",
    "CurrPcieLinkWidth",
    "MaxPcieLinkGeneration",
    "MaxPcieLinkWidth",
    "PcieReplayCounter",
    "NumFans",
    "FanSpeed",
    "MigMode",
    "EccMode",
    "RowRemapperHistogram",
    "RemappedRows",
    "PersistenceMode",
    "ComputeMode",
    "VirtualizationMode",
    "RetiredPagesPendingStatus",
    "ComputeRunningProcesses",
    "GraphicsRunningProcesses",
    "MPSComputeRunningProcesses",
    "UUID",
    "Name",
    "Serial",
    "VbiosVersion",
    "PciInfo",
    "Architecture",
    "SupportedEventTypes",
)
_CLOCKS = {"graphics": 0, "sm": 1, "memory": 2, "video": 3}


def calls() -> Iterator[tuple[str, Call]]:
    """Each by its name without ``nvmlDeviceGet``, the argument after a slash."""
    for name in _OF_THE_HANDLE:
        function = getattr(pynvml, f"nvmlDeviceGet{name}", None)
        if function is not None:
            yield name, function
    yield "MemoryInfo_v2", lambda h: pynvml.nvmlDeviceGetMemoryInfo(h, pynvml.nvmlMemory_v2)
    yield "Temperature", lambda h: pynvml.nvmlDeviceGetTemperature(h, 0)
    yield "TemperatureV", lambda h: pynvml.nvmlDeviceGetTemperatureV(h, 0)
    yield "TemperatureThreshold/slowdown", lambda h: pynvml.nvmlDeviceGetTemperatureThreshold(h, 1)
    for domain, kind in _CLOCKS.items():
        yield f"ClockInfo/{domain}", _with(pynvml.nvmlDeviceGetClockInfo, kind)
    yield "MaxClockInfo/sm", _with(pynvml.nvmlDeviceGetMaxClockInfo, 1)
    yield "NvLinkState/0", _with(pynvml.nvmlDeviceGetNvLinkState, 0)
    yield "ViolationStatus/power", _with(pynvml.nvmlDeviceGetViolationStatus, 0)
    yield "ViolationStatus/thermal", _with(pynvml.nvmlDeviceGetViolationStatus, 1)
    yield "PcieThroughput/tx", _with(pynvml.nvmlDeviceGetPcieThroughput, 0)
    yield "PcieThroughput/rx", _with(pynvml.nvmlDeviceGetPcieThroughput, 1)
    yield "ProcessUtilization", _with(pynvml.nvmlDeviceGetProcessUtilization, 0)
    yield "HandleByIndex", lambda h: pynvml.nvmlDeviceGetHandleByIndex(0)
    yield "Count", lambda h: pynvml.nvmlDeviceGetCount()
    yield "SystemGetDriverVersion", lambda h: pynvml.nvmlSystemGetDriverVersion()


def _with(function: Callable[..., Any], argument: int) -> Call:
    return lambda handle: function(handle, argument)


SAMPLE_TYPES = {
    "total_power": 0,
    "gpu_utilization": 1,
    "memory_utilization": 2,
    "encoder_utilization": 3,
    "decoder_utilization": 4,
    "processor_clock": 5,
    "memory_clock": 6,
    "module_power": 7,
    "jpeg_utilization": 8,
    "ofa_utilization": 9,
}
