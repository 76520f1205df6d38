"""Every metric of a device's links and of its errors: one row each."""

from __future__ import annotations

from warpwatch_telemetry.metric import Metric
from warpwatch_telemetry.metric import device_metric as _row

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
