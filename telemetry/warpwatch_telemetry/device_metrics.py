"""Every metric of a device: one row each.

Origins name the NVML call or field (nvml.h 13.5) that the value comes from; "GPM" are the counters
that Hopper and newer devices keep by themselves.
"""

from __future__ import annotations

from warpwatch_telemetry.metric import Kind, Metric

# Why clocks are below their maximum: the bits of nvmlDeviceGetCurrentClocksEventReasons.
THROTTLE_REASONS = (
    "idle",
    "application_clocks",
    "sw_power_cap",
    "hw_slowdown",
    "sync_boost",
    "sw_thermal",
    "hw_thermal",
    "hw_power_brake",
    "display_clocks",
)
# The reasons whose time the driver counts itself.
TIMED_THROTTLE_REASONS = (
    "sw_power_cap",
    "sync_boost",
    "sw_thermal",
    "hw_thermal",
    "hw_power_brake",
)
# NVML_FI_DEV_PERF_POLICY_*, in the order of the field numbers from 74 on.
VIOLATION_POLICIES = (
    "power",
    "thermal",
    "sync_boost",
    "board_limit",
    "low_utilization",
    "reliability",
    "application_clocks",
    "base_clocks",
)
CLOCK_DOMAINS = ("graphics", "sm", "memory", "video")


def _row(
    name: str,
    kind: Kind,
    help: str,
    origin: str,
    *labels: str,
    unit: str = "",
) -> Metric:
    return Metric(f"device_{name}", kind, help, "device", labels=labels, unit=unit, origin=origin)


def _share(name: str, help: str, origin: str, *labels: str) -> Metric:
    return _row(f"{name}_ratio", "gauge", help, origin, *labels, unit="ratio")


_IDENTITY = (
    _row(
        "up",
        "gauge",
        "Whether the device can be read; the reason says why not "
        "(lost, stuck, no_permission, reset_required, driver).",
        "every source",
        "reason",
    ),
    _row(
        "info",
        "gauge",
        "What describes the device; always 1.",
        "nvmlDeviceGetName, …GetPciInfo, …GetVbiosVersion, …GetSerial, …GetArchitecture; "
        "nvmlSystemGetDriverVersion",
        *("name", "driver_version", "pci_bus_id", "vbios_version", "serial", "architecture"),
        "simulated",
    ),
    _row(
        "workload_info",
        "gauge",
        "The container that the device is allocated to; always 1.",
        "kubelet pod-resources",
        *("namespace", "pod", "container"),
    ),
    _row(
        "sample_timestamp_seconds",
        "gauge",
        "When the device was last read (wall clock).",
        "every source",
        unit="seconds",
    ),
    _row(
        "recovery_action",
        "gauge",
        "What the driver asks for: 0 nothing, 1 reset, 2 reboot, 3 drain peer-to-peer, "
        "4 drain and reset.",
        "field 230",
    ),
    _row(
        "persistence_mode",
        "gauge",
        "Whether the driver stays loaded without a client.",
        "nvmlDeviceGetPersistenceMode",
    ),
    _row("ecc_mode", "gauge", "Whether ECC is on.", "field 1"),
    _row("mig_mode", "gauge", "Whether MIG is on.", "nvmlDeviceGetMigMode"),
    _row(
        "compute_mode",
        "gauge",
        "0 default, 2 prohibited, 3 exclusive process.",
        "nvmlDeviceGetComputeMode",
    ),
)

_VIRTUALIZATION = (
    _row(
        "vgpu_licensed",
        "gauge",
        "Whether a vGPU license is in use; 0 on bare metal.",
        "nvmlDeviceGetVirtualizationMode, …GetGridLicensableFeatures",
    ),
    _row(
        "slurm_job_info",
        "gauge",
        "A Slurm job that runs on the device; always 1.",
        "control groups of the device's processes, or a job folder",
        "slurm_job",
    ),
)

_ACTIVITY = (
    _share(
        "utilization",
        "Share of the driver's last period in which at least one kernel ran.",
        "nvmlDeviceGetUtilizationRates gpu",
    ),
    _share(
        "memory_utilization",
        "Share of the driver's last period in which memory was read or written.",
        "nvmlDeviceGetUtilizationRates memory",
    ),
    _share(
        "encoder_utilization",
        "Utilization of the video encoders.",
        "nvmlDeviceGetEncoderUtilization",
    ),
    _share(
        "decoder_utilization",
        "Utilization of the video decoders.",
        "nvmlDeviceGetDecoderUtilization",
    ),
    _share("jpeg_utilization", "Utilization of the JPEG engines.", "nvmlDeviceGetJpgUtilization"),
    _share(
        "ofa_utilization",
        "Utilization of the optical flow accelerators.",
        "nvmlDeviceGetOfaUtilization",
    ),
    _row(
        "busy_seconds_total",
        "counter",
        "Time in which at least one kernel ran: utilization integrated over time.",
        "nvmlDeviceGetSamples gpu, integrated; nvmlDeviceGetUtilizationRates",
        unit="seconds",
    ),
    _share(
        "graphics_active",
        "Share of time in which the graphics or compute engine was active.",
        "GPM 1",
    ),
    _share(
        "sm_active",
        "Share of SMs that were busy, on average.",
        "GPM 2",
    ),
    _share(
        "sm_occupancy",
        "Resident warps as a share of the maximum.",
        "GPM 3",
    ),
    _share(
        "tensor_active",
        "Share of cycles in which the tensor cores were active.",
        "GPM 5",
    ),
    _share(
        "tensor_type_active",
        "Share of cycles in which the tensor cores worked on a type (dfma, hmma, imma).",
        "GPM 6, 7, 9",
        "type",
    ),
    _share(
        "pipe_active",
        "Share of cycles in which a pipe was active (fp64, fp32, fp16, integer).",
        "GPM 4, 11-13",
        "pipe",
    ),
    _share(
        "dram_active",
        "Share of cycles in which device memory was sending or receiving.",
        "GPM 10",
    ),
)


def _memory(state: str, help: str) -> Metric:
    return _row(
        f"memory_{state}_bytes",
        "gauge",
        help,
        f"nvmlDeviceGetMemoryInfo_v2 {state}",
        unit="bytes",
    )


def _bar1(state: str) -> Metric:
    return _row(
        f"bar1_memory_{state}_bytes",
        "gauge",
        f"BAR1 address space, {state}.",
        f"nvmlDeviceGetBAR1MemoryInfo {state}",
        unit="bytes",
    )


_MEMORY = (
    _memory("used", "Memory in use, without what the driver reserves."),
    _memory("free", "Memory that can be allocated."),
    _memory("total", "Physical memory."),
    _memory("reserved", "Memory that the driver keeps for itself."),
    _bar1("used"),
    _bar1("free"),
    _bar1("total"),
    Metric(
        "process_gpu_memory_bytes",
        "gauge",
        "Device memory of a process (host PID; the executable's name).",
        "device",
        labels=("pid", "process"),
        unit="bytes",
        origin="nvmlDeviceGetComputeRunningProcesses",
    ),
    Metric(
        "process_gpu_utilization_ratio",
        "gauge",
        "Share of SM time that a process used.",
        "device",
        labels=("pid", "process"),
        unit="ratio",
        origin="nvmlDeviceGetProcessUtilization",
    ),
)


def _power(name: str, help: str, origin: str) -> Metric:
    return _row(f"power_{name}watts", "gauge", help, origin, unit="watts")


_POWER_AND_CLOCKS = (
    _power(
        "",
        "Power draw; since Ampere (GA100 excepted) the driver averages it over a second.",
        "field 185; nvmlDeviceGetPowerUsage",
    ),
    _power("instant_", "Power draw at this moment.", "field 186"),
    _power("limit_", "The power limit in force.", "nvmlDeviceGetEnforcedPowerLimit"),
    _power("limit_default_", "The power limit after a reset.", "field 189"),
    _power("limit_min_", "The lowest power limit that can be set.", "field 187"),
    _power("limit_max_", "The highest power limit that can be set.", "field 188"),
    _row(
        "energy_joules_total",
        "counter",
        "Energy used since the driver was loaded; where the device does not count it, power "
        "integrated since the daemon was started.",
        "field 83; nvmlDeviceGetSamples power, integrated",
        unit="joules",
    ),
    _row(
        "temperature_celsius",
        "gauge",
        "Temperature of a sensor (gpu, memory).",
        "nvmlDeviceGetTemperatureV; field 82",
        "sensor",
        unit="celsius",
    ),
    _row(
        "temperature_threshold_celsius",
        "gauge",
        "Temperature at which the device acts (shutdown, slowdown, memory_max, gpu_max).",
        "nvmlDeviceGetTemperatureThreshold",
        "threshold",
        unit="celsius",
    ),
    _row(
        "temperature_margin_celsius",
        "gauge",
        "How much warmer the device may get before it slows down (T.Limit).",
        "nvmlDeviceGetMarginTemperature",
        unit="celsius",
    ),
    _row(
        "temperature_margin_threshold_celsius",
        "gauge",
        "The margin (T.Limit) at which the device acts (shutdown, slowdown, memory_max, gpu_max).",
        "fields 193-196",
        "threshold",
        unit="celsius",
    ),
    _row(
        "clock_hertz",
        "gauge",
        "Clock of a domain now.",
        "nvmlDeviceGetClockInfo",
        "domain",
        unit="hertz",
    ),
    _row(
        "clock_max_hertz",
        "gauge",
        "The highest clock of a domain.",
        "nvmlDeviceGetMaxClockInfo",
        "domain",
        unit="hertz",
    ),
    _row(
        "performance_state",
        "gauge",
        "P-state: 0 is the fastest, 15 the slowest.",
        "nvmlDeviceGetPerformanceState",
    ),
    _share("fan_speed", "Intended speed of a fan.", "nvmlDeviceGetFanSpeed_v2", "fan"),
    _row(
        "throttle_active",
        "gauge",
        "Whether a reason holds clocks down at this moment.",
        "nvmlDeviceGetCurrentClocksEventReasons",
        "reason",
    ),
    _row(
        "throttle_seconds_total",
        "counter",
        "Time for which a reason held clocks down.",
        "fields 74, 76, 269-271",
        "reason",
        unit="seconds",
    ),
    _row(
        "violation_seconds_total",
        "counter",
        "Time for which a policy kept the device below its highest performance.",
        "fields 74-81",
        "policy",
        unit="seconds",
    ),
)


DEVICE_METRICS = _IDENTITY + _VIRTUALIZATION + _ACTIVITY + _MEMORY + _POWER_AND_CLOCKS
