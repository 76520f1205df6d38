"""Every metric of the host and of its network ports: one row each."""

from __future__ import annotations

from warpwatch_telemetry.metric import Metric, metric

CPU_MODES = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal")
PRESSURE_RESOURCES = ("cpu", "memory", "io")


def _row(name: str, help: str, origin: str, *labels: str) -> Metric:
    return metric(f"host_{name}", help, "host", origin, *labels)


_CPU = (
    _row("cpu_cores", "Logical processors.", "/proc/stat"),
    _row("cpu_seconds_total", "Processor time of all cores by mode.", "/proc/stat", "mode"),
    _row(
        "load_average",
        "Processes that run or wait, averaged over a window (1m, 5m, 15m).",
        "/proc/loadavg",
        "window",
    ),
    _row(
        "pressure_seconds_total",
        "Time in which some or all (full) tasks waited for a resource (cpu, memory, io).",
        "/proc/pressure",
        *("resource", "kind"),
    ),
    _row("boot_timestamp_seconds", "When the host was started (wall clock).", "/proc/stat"),
)

_MEMORY = (
    _row("memory_total_bytes", "Physical memory.", "/proc/meminfo"),
    _row("memory_available_bytes", "Memory that can be had without swapping.", "/proc/meminfo"),
    _row("memory_used_bytes", "Memory in use by processes and the kernel.", "/proc/meminfo"),
    _row("memory_cached_bytes", "Memory that caches files.", "/proc/meminfo"),
    _row(
        "memory_shared_bytes", "Shared memory, in which data loaders pass batches.", "/proc/meminfo"
    ),
    _row("swap_total_bytes", "Swap space.", "/proc/meminfo"),
    _row("swap_used_bytes", "Swap space in use.", "/proc/meminfo"),
    _row("swap_in_bytes_total", "Bytes swapped in.", "/proc/vmstat"),
    _row("swap_out_bytes_total", "Bytes swapped out.", "/proc/vmstat"),
)

_DISK = (
    _row("disk_read_bytes_total", "Bytes read from a disk.", "/proc/diskstats", "device"),
    _row("disk_written_bytes_total", "Bytes written to a disk.", "/proc/diskstats", "device"),
    _row("disk_reads_total", "Reads that a disk completed.", "/proc/diskstats", "device"),
    _row("disk_writes_total", "Writes that a disk completed.", "/proc/diskstats", "device"),
    _row("disk_busy_seconds_total", "Time in which a disk was busy.", "/proc/diskstats", "device"),
)

_NETWORK = (
    _row("network_receive_bytes_total", "Bytes received.", "/proc/net/dev", "interface"),
    _row("network_transmit_bytes_total", "Bytes sent.", "/proc/net/dev", "interface"),
    _row("network_receive_errors_total", "Errors while receiving.", "/proc/net/dev", "interface"),
    _row("network_transmit_errors_total", "Errors while sending.", "/proc/net/dev", "interface"),
    _row("network_receive_drops_total", "Received packets dropped.", "/proc/net/dev", "interface"),
    _row(
        "network_transmit_drops_total", "Packets dropped, not sent.", "/proc/net/dev", "interface"
    ),
)


def _process(name: str, help: str, origin: str, *labels: str) -> Metric:
    return metric(name, help, "host", origin, "pid", "process", *labels)


_PROCESSES = (
    _process(
        "process_info",
        "A process that uses a GPU, and what its control groups say of its owner; always 1.",
        "/proc/*/cgroup",
        *("pod_uid", "container_id", "slurm_job", "namespace", "pod"),
    ),
    _process(
        "process_cpu_seconds_total",
        "Processor time of a process that uses a GPU (self), and of the processes that it "
        "started, such as data loader workers (children).",
        "/proc/*/stat",
        "of",
    ),
    _process(
        "process_resident_memory_bytes",
        "Host memory of a process that uses a GPU (self) and of those that it started (children).",
        "/proc/*/statm",
        "of",
    ),
    _process(
        "process_io_wait_seconds_total",
        "Time for which a process that uses a GPU (self) and those that it started (children) "
        "waited for disks.",
        "/proc/*/stat delayacct_blkio_ticks",
        "of",
    ),
    _process(
        "process_children",
        "Processes that a process that uses a GPU has started and that live.",
        "/proc/*/stat",
    ),
)

HOST_METRICS = _CPU + _MEMORY + _DISK + _NETWORK + _PROCESSES


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


def _port_row(name: str, help: str, origin: str, *labels: str) -> Metric:
    return metric(f"network_port_{name}", help, "host", origin, "device", "port", *labels)


NETWORK_METRICS = (
    _port_row(
        "info",
        "A port of an RDMA device: InfiniBand, Ethernet (RoCE) or Unspecified (EFA); always 1.",
        "link_layer; ../../hca_type, ../../fw_ver",
        *("link_layer", "hca", "firmware"),
    ),
    _port_row("up", "Whether the port is active; EFA always says so.", "state"),
    _port_row("rate_bytes_per_second", "What the port can carry now.", "rate"),
    _port_row("receive_bytes_total", "Bytes received by RDMA.", "counters/port_rcv_data"),
    _port_row("transmit_bytes_total", "Bytes sent by RDMA.", "counters/port_xmit_data"),
    _port_row("errors_total", "Errors of a port, by counter.", "counters/*, hw_counters/*", "type"),
    _port_row(
        "congestion_total",
        "Waiting for credits, and congestion control, by counter: normal under load.",
        "counters/port_xmit_wait, hw_counters/np_*, rp_*",
        "type",
    ),
    _port_row("gpu_info", "A GPU behind the same PCIe switch; always 1.", "../../device", "uuid"),
)
