"""Every metric of the host: one row each. They tell a starving data loader from a slow disk."""

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
