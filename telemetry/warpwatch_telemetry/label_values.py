"""Lists the values of labels that metrics have, in the order of their sources."""

from __future__ import annotations

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


CPU_MODES = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal")
PRESSURE_RESOURCES = ("cpu", "memory", "io")
# Errors a second, by counter file, above which a port is in trouble; 0: a single one is. The worst
# come first. Limits are those of NVSentinel's link counters, and for others those of their kind.
ERRORS: dict[str, float] = {
    "counters/link_downed": 0.0,
    "counters/excessive_buffer_overrun_errors": 0.0,
    "counters/local_link_integrity_errors": 0.0,
    "hw_counters/req_transport_retries_exceeded": 0.0,
    "hw_counters/req_rnr_retries_exceeded": 0.0,
    "counters/link_error_recovery": 5 / 60,
    "hw_counters/local_ack_timeout_err": 1.0,
    "hw_counters/retrans_timeout_events": 1.0,
    "counters/symbol_error": 10.0,
    "counters/port_rcv_errors": 10.0,
    "hw_counters/rx_drops": 10.0,
    "hw_counters/rnr_nak_retry_err": 10.0,
    "hw_counters/roce_adp_retrans": 10.0,
    "hw_counters/roce_slow_restart": 10.0,
    "counters/port_xmit_discards": 100.0,
    "hw_counters/out_of_sequence": 100.0,
    "hw_counters/packet_seq_err": 100.0,
    "hw_counters/implied_nak_seq_err": 100.0,
    "hw_counters/out_of_buffer": 100.0,
    "hw_counters/retrans_pkts": 100.0,
}
# Congestion control at work, which is normal under load.
CONGESTION = (
    "counters/port_xmit_wait",
    "hw_counters/np_ecn_marked_roce_packets",
    "hw_counters/np_cnp_sent",
    "hw_counters/rp_cnp_handled",
)
