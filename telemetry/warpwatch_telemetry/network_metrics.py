"""Every metric of RDMA ports: one row each. Files are below /sys/class/infiniband/*/ports/*."""

from __future__ import annotations

from warpwatch_telemetry.metric import Metric, metric

# By file: how many a second are beyond what links and drivers put right by themselves; 0: a single
# one is. The worst first. Limits are those of NVSentinel's link counters; what it does not have is
# held to what it has of the same kind.
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


def _row(name: str, help: str, origin: str, *labels: str) -> Metric:
    return metric(f"network_port_{name}", help, "host", origin, "device", "port", *labels)


NETWORK_METRICS = (
    _row(
        "info",
        "A port of an RDMA device: InfiniBand, Ethernet (RoCE) or Unspecified (EFA); always 1.",
        "link_layer; ../../hca_type, ../../fw_ver",
        *("link_layer", "hca", "firmware"),
    ),
    _row("up", "Whether the port is active; EFA always says so.", "state"),
    _row("rate_bytes_per_second", "What the port can carry now.", "rate"),
    _row("receive_bytes_total", "Bytes received by RDMA.", "counters/port_rcv_data"),
    _row("transmit_bytes_total", "Bytes sent by RDMA.", "counters/port_xmit_data"),
    _row("errors_total", "Errors of a port, by counter.", "counters/*, hw_counters/*", "type"),
    _row(
        "congestion_total",
        "Waiting for credits, and congestion control, by counter: normal under load.",
        "counters/port_xmit_wait, hw_counters/np_*, rp_*",
        "type",
    ),
    _row("gpu_info", "A GPU behind the same PCIe switch; always 1.", "../../device", "uuid"),
)
