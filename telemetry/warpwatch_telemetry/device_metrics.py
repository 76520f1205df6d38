"""Every metric of a device: one row each.

Origins name the NVML call or field (nvml.h 13.5) that the value comes from; "GPM" are the counters
that Hopper and newer devices keep by themselves.
"""

from __future__ import annotations

from warpwatch_telemetry.metric import Metric, metric
from warpwatch_telemetry.metric import device_metric as _row

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


_IDENTITY = (
    _row(
        "up",
        "Whether the device can be read; the reason says why not "
        "(lost, stuck, no_permission, reset_required, driver).",
        "every source",
        "reason",
    ),
    _row(
        "info",
        "What describes the device; always 1.",
        "nvmlDeviceGetName, …GetPciInfo, …GetVbiosVersion, …GetSerial, …GetArchitecture; "
        "nvmlSystemGetDriverVersion",
        *("name", "driver_version", "pci_bus_id", "vbios_version", "serial", "architecture"),
        "simulated",
    ),
    _row(
        "workload_info",
        "The container that the device is allocated to; always 1.",
        "kubelet pod-resources",
        *("namespace", "pod", "container"),
    ),
    _row("sample_timestamp_seconds", "When the device was last read (wall clock).", "every source"),
    _row(
        "recovery_action",
        "What the driver asks for: 0 nothing, 1 reset, 2 reboot, 3 drain peer-to-peer, "
        "4 drain and reset.",
        "field 230",
    ),
    _row(
        "persistence_mode",
        "Whether the driver stays loaded without a client.",
        "nvmlDeviceGetPersistenceMode",
    ),
    _row("ecc_mode", "Whether ECC is on.", "field 1"),
    _row("mig_mode", "Whether MIG is on.", "nvmlDeviceGetMigMode"),
    _row(
        "compute_mode", "0 default, 2 prohibited, 3 exclusive process.", "nvmlDeviceGetComputeMode"
    ),
)

_VIRTUALIZATION = (
    _row(
        "vgpu_licensed",
        "Whether a vGPU license is in use; 0 on bare metal.",
        "nvmlDeviceGetVirtualizationMode, …GetGridLicensableFeatures",
    ),
    _row(
        "slurm_job_info",
        "A Slurm job that runs on the device, and whose it is; always 1.",
        "control groups and environment of the device's processes, or a job folder",
        *("slurm_job", "user", "account", "partition"),
    ),
)

_ACTIVITY = (
    _row(
        "utilization_ratio",
        "Share of the driver's last period in which at least one kernel ran.",
        "nvmlDeviceGetUtilizationRates gpu",
    ),
    _row(
        "memory_utilization_ratio",
        "Share of the driver's last period in which memory was read or written.",
        "nvmlDeviceGetUtilizationRates memory",
    ),
    _row(
        "encoder_utilization_ratio",
        "Utilization of the video encoders.",
        "nvmlDeviceGetEncoderUtilization",
    ),
    _row(
        "decoder_utilization_ratio",
        "Utilization of the video decoders.",
        "nvmlDeviceGetDecoderUtilization",
    ),
    _row(
        "jpeg_utilization_ratio", "Utilization of the JPEG engines.", "nvmlDeviceGetJpgUtilization"
    ),
    _row(
        "ofa_utilization_ratio",
        "Utilization of the optical flow accelerators.",
        "nvmlDeviceGetOfaUtilization",
    ),
    _row(
        "busy_seconds_total",
        "Time in which at least one kernel ran: utilization integrated over time.",
        "nvmlDeviceGetSamples gpu, integrated; nvmlDeviceGetUtilizationRates",
    ),
    _row(
        "graphics_active_ratio",
        "Share of time in which the graphics or compute engine was active.",
        "GPM 1",
    ),
    _row("sm_active_ratio", "Share of SMs that were busy, on average.", "GPM 2"),
    _row("sm_occupancy_ratio", "Resident warps as a share of the maximum.", "GPM 3"),
    _row("tensor_active_ratio", "Share of cycles in which the tensor cores were active.", "GPM 5"),
    _row(
        "tensor_type_active_ratio",
        "Share of cycles in which the tensor cores worked on a type (dfma, hmma, imma).",
        "GPM 6, 7, 9",
        "type",
    ),
    _row(
        "pipe_active_ratio",
        "Share of cycles in which a pipe was active (fp64, fp32, fp16, integer).",
        "GPM 4, 11-13",
        "pipe",
    ),
    _row(
        "dram_active_ratio",
        "Share of cycles in which device memory was sending or receiving.",
        "GPM 10",
    ),
)


def _memory(state: str, help: str) -> Metric:
    return _row(f"memory_{state}_bytes", help, f"nvmlDeviceGetMemoryInfo_v2 {state}")


def _bar1(state: str) -> Metric:
    origin = f"nvmlDeviceGetBAR1MemoryInfo {state}"
    return _row(f"bar1_memory_{state}_bytes", f"BAR1 address space, {state}.", origin)


_MEMORY = (
    _memory("used", "Memory in use, without what the driver reserves."),
    _memory("free", "Memory that can be allocated."),
    _memory("total", "Physical memory."),
    _memory("reserved", "Memory that the driver keeps for itself."),
    _bar1("used"),
    _bar1("free"),
    _bar1("total"),
    metric(
        "process_gpu_memory_bytes",
        "Device memory of a process (host PID; the executable's name).",
        "device",
        "nvmlDeviceGetComputeRunningProcesses",
        "pid",
        "process",
    ),
    metric(
        "process_gpu_utilization_ratio",
        "Share of SM time that a process used.",
        "device",
        "nvmlDeviceGetProcessUtilization",
        "pid",
        "process",
    ),
)


_POWER_AND_CLOCKS = (
    _row(
        "power_watts",
        "Power draw; since Ampere (GA100 excepted) the driver averages it over a second.",
        "field 185; nvmlDeviceGetPowerUsage",
    ),
    _row("power_instant_watts", "Power draw at this moment.", "field 186"),
    _row("power_limit_watts", "The power limit in force.", "nvmlDeviceGetEnforcedPowerLimit"),
    _row("power_limit_default_watts", "The power limit after a reset.", "field 189"),
    _row("power_limit_min_watts", "The lowest power limit that can be set.", "field 187"),
    _row("power_limit_max_watts", "The highest power limit that can be set.", "field 188"),
    _row(
        "energy_joules_total",
        "Energy used since the driver was loaded; where the device does not count it, power "
        "integrated since the daemon was started.",
        "field 83; nvmlDeviceGetSamples power, integrated",
    ),
    _row(
        "temperature_celsius",
        "Temperature of a sensor (gpu, memory).",
        "nvmlDeviceGetTemperatureV; field 82",
        "sensor",
    ),
    _row(
        "temperature_threshold_celsius",
        "Temperature at which the device acts (shutdown, slowdown, memory_max, gpu_max).",
        "nvmlDeviceGetTemperatureThreshold",
        "threshold",
    ),
    _row(
        "temperature_margin_celsius",
        "How much warmer the device may get before it slows down (T.Limit).",
        "nvmlDeviceGetMarginTemperature",
    ),
    _row(
        "temperature_margin_threshold_celsius",
        "The margin (T.Limit) at which the device acts (shutdown, slowdown, memory_max, gpu_max).",
        "fields 193-196",
        "threshold",
    ),
    _row("clock_hertz", "Clock of a domain now.", "nvmlDeviceGetClockInfo", "domain"),
    _row(
        "clock_max_hertz", "The highest clock of a domain.", "nvmlDeviceGetMaxClockInfo", "domain"
    ),
    _row(
        "performance_state",
        "P-state: 0 is the fastest, 15 the slowest.",
        "nvmlDeviceGetPerformanceState",
    ),
    _row("fan_speed_ratio", "Intended speed of a fan.", "nvmlDeviceGetFanSpeed_v2", "fan"),
    _row(
        "throttle_active",
        "Whether a reason holds clocks down at this moment.",
        "nvmlDeviceGetCurrentClocksEventReasons",
        "reason",
    ),
    _row(
        "throttle_seconds_total",
        "Time for which a reason held clocks down.",
        "fields 74, 76, 269-271",
        "reason",
    ),
    _row(
        "violation_seconds_total",
        "Time for which a policy kept the device below its highest performance.",
        "fields 74-81",
        "policy",
    ),
)


DEVICE_METRICS = _IDENTITY + _VIRTUALIZATION + _ACTIVITY + _MEMORY + _POWER_AND_CLOCKS


PCIE_ERRORS = (
    "correctable",
    "naks_received",
    "receiver",
    "bad_tlp",
    "naks_sent",
    "bad_dllp",
    "non_fatal",
    "fatal",
    "unsupported_request",
    "lcrc",
    "lane",
)
NVLINK_ERRORS = ("crc_flit", "crc_data", "replay", "recovery")
ECC_LOCATIONS = ("l1_cache", "l2_cache", "dram", "register_file", "texture")
# nvmlRowRemapperHistogramValues_t: banks by how many spare rows they have left.
REMAP_AVAILABILITIES = ("max", "high", "partial", "low", "none")


def _link_bytes(link: str, direction: str, origin: str) -> Metric:
    verb = {"receive": "received", "transmit": "sent"}[direction]
    return _row(f"{link.lower()}_{direction}_bytes_total", f"Bytes {verb} over {link}.", origin)


def _link_rate(link: str, direction: str, origin: str) -> Metric:
    verb = {"receive": "received", "transmit": "sent"}[direction]
    return _row(
        f"{link.lower()}_{direction}_bytes_per_second",
        f"Bytes {verb} over {link} in a second, as the device measured it last.",
        origin,
    )


# Drivers give 32 or 64 bits.
_FIELD_WRAPS = "where it has 64 bits or the link cannot carry 4 GiB between two readings"

_LINKS = (
    _link_bytes("PCIe", "receive", f"GPM 21, integrated; else field 198, {_FIELD_WRAPS}"),
    _link_bytes("PCIe", "transmit", f"GPM 20, integrated; else field 197, {_FIELD_WRAPS}"),
    _link_rate("PCIe", "receive", "GPM 21"),
    _link_rate("PCIe", "transmit", "GPM 20"),
    _row("pcie_replay_total", "PCIe packets that were sent again.", "field 94"),
    _row("pcie_errors_total", "PCIe errors by type.", "fields 173-183", "type"),
    _row(
        "pcie_link_generation",
        "PCIe generation of the link now; it falls when idle.",
        "nvmlDeviceGetCurrPcieLinkGeneration",
    ),
    _row(
        "pcie_link_generation_max",
        "The highest PCIe generation that device and slot allow.",
        "nvmlDeviceGetMaxPcieLinkGeneration",
    ),
    _row("pcie_link_width_lanes", "PCIe lanes in use.", "nvmlDeviceGetCurrPcieLinkWidth"),
    _row(
        "pcie_link_width_max_lanes",
        "PCIe lanes that device and slot allow.",
        "nvmlDeviceGetMaxPcieLinkWidth",
    ),
    _link_bytes("NVLink", "receive", "field 139, all links; GPM 60, integrated"),
    _link_bytes("NVLink", "transmit", "field 138, all links; GPM 61, integrated"),
    _link_rate("NVLink", "receive", "GPM 60; field 139 over time"),
    _link_rate("NVLink", "transmit", "GPM 61; field 138 over time"),
    _row(
        "nvlink_errors_total",
        "NVLink errors over all links (crc_flit, crc_data, replay, recovery; on NVLink 5 recovery "
        "and receive: packets that arrived with errors).",
        "fields 38, 45, 52, 59; 208, 215",
        "type",
    ),
    _row(
        "nvlink_fabric_state",
        "Registration with the NVLink fabric: 1 not begun, 2 going on, 3 completed.",
        "nvmlDeviceGetGpuFabricInfoV",
    ),
    _row(
        "nvlink_fabric_healthy",
        "0: the fabric is unhealthy or of limited capacity for this device.",
        "nvmlDeviceGetGpuFabricInfoV healthSummary",
    ),
    _row("nvlink_links", "NVLinks that the device has.", "nvmlDeviceGetNvLinkState"),
    _row("nvlink_links_up", "NVLinks that are up.", "nvmlDeviceGetNvLinkState"),
    _row("nvlink_link_up", "Whether an NVLink is up.", "nvmlDeviceGetNvLinkState", "link"),
)

_ERRORS = (
    _row(
        "ecc_errors_total",
        "ECC errors since the driver was loaded (corrected, uncorrected).",
        "fields 3, 4",
        "type",
    ),
    _row(
        "ecc_aggregate_errors_total",
        "ECC errors over the device's life (corrected, uncorrected).",
        "fields 5, 6",
        "type",
    ),
    _row(
        "ecc_location_errors_total",
        "ECC errors since the driver was loaded, by location.",
        "fields 7-16",
        *("type", "location"),
    ),
    _row(
        "remapped_rows",
        "Memory rows replaced by spare ones, by the errors that caused it "
        "(correctable, uncorrectable).",
        "fields 142, 143",
        "type",
    ),
    _row("row_remap_pending", "Whether rows wait for the next reset to be remapped.", "field 144"),
    _row(
        "row_remap_failure",
        "Whether remapping a row has failed: the device must be replaced.",
        "field 145",
    ),
    _row(
        "row_remap_banks",
        "Memory banks by how many spare rows they have left.",
        "nvmlDeviceGetRowRemapperHistogram",
        "availability",
    ),
    _row(
        "retired_pages",
        "Memory pages taken out of use, by the errors that caused it (single_bit, double_bit).",
        "fields 29, 30",
        "cause",
    ),
    _row(
        "retired_pages_pending", "Whether pages wait for the next reset to be retired.", "field 31"
    ),
    _row(
        "xid_errors_total",
        "XID errors seen by the daemon, each once.",
        "NVML events, kernel log",
        "xid",
    ),
    _row(
        "health_events_total",
        "What the driver reported of the device's health besides XIDs.",
        "NVML events",
        "event",
    ),
    _row(
        "xid_last_timestamp_seconds",
        "When an XID was last seen (wall clock).",
        "NVML events, kernel log",
        "xid",
    ),
)

RELIABILITY_METRICS = _LINKS + _ERRORS
