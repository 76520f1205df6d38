"""Every metric of the host: one row each. They tell a starving data loader from a slow disk."""

from __future__ import annotations

from warpwatch_telemetry.metric import Kind, Metric

CPU_MODES = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal")
PRESSURE_RESOURCES = ("cpu", "memory", "io")


def _row(name: str, kind: Kind, help: str, origin: str, *labels: str, unit: str = "") -> Metric:
    return Metric(f"host_{name}", kind, help, "host", labels=labels, unit=unit, origin=origin)


def _bytes(name: str, help: str, origin: str) -> Metric:
    return _row(f"{name}_bytes", "gauge", help, origin, unit="bytes")


def _counted(name: str, help: str, label: str, origin: str) -> Metric:
    unit = next((unit for unit in ("bytes", "seconds") if name.endswith(unit)), "")
    return _row(f"{name}_total", "counter", help, origin, label, unit=unit)


_CPU = (
    _row("cpu_cores", "gauge", "Logical processors.", "/proc/stat"),
    _counted("cpu_seconds", "Processor time of all cores by mode.", "mode", "/proc/stat"),
    _row(
        "load_average",
        "gauge",
        "Processes that run or wait, averaged over a window (1m, 5m, 15m).",
        "/proc/loadavg",
        "window",
    ),
    _row(
        "pressure_seconds_total",
        "counter",
        "Time in which some or all (full) tasks waited for a resource (cpu, memory, io).",
        "/proc/pressure",
        *("resource", "kind"),
        unit="seconds",
    ),
    _row(
        "boot_timestamp_seconds",
        "gauge",
        "When the host was started (wall clock).",
        "/proc/stat",
        unit="seconds",
    ),
)

_MEMORY = (
    _bytes("memory_total", "Physical memory.", "/proc/meminfo"),
    _bytes("memory_available", "Memory that can be had without swapping.", "/proc/meminfo"),
    _bytes("memory_used", "Memory in use by processes and the kernel.", "/proc/meminfo"),
    _bytes("memory_cached", "Memory that caches files.", "/proc/meminfo"),
    _bytes("memory_shared", "Shared memory, in which data loaders pass batches.", "/proc/meminfo"),
    _bytes("swap_total", "Swap space.", "/proc/meminfo"),
    _bytes("swap_used", "Swap space in use.", "/proc/meminfo"),
    _row("swap_in_bytes_total", "counter", "Bytes swapped in.", "/proc/vmstat", unit="bytes"),
    _row("swap_out_bytes_total", "counter", "Bytes swapped out.", "/proc/vmstat", unit="bytes"),
)

_DISK = (
    _counted("disk_read_bytes", "Bytes read from a disk.", "device", "/proc/diskstats"),
    _counted("disk_written_bytes", "Bytes written to a disk.", "device", "/proc/diskstats"),
    _counted("disk_reads", "Reads that a disk completed.", "device", "/proc/diskstats"),
    _counted("disk_writes", "Writes that a disk completed.", "device", "/proc/diskstats"),
    _counted("disk_busy_seconds", "Time in which a disk was busy.", "device", "/proc/diskstats"),
)

_NETWORK = (
    _counted("network_receive_bytes", "Bytes received.", "interface", "/proc/net/dev"),
    _counted("network_transmit_bytes", "Bytes sent.", "interface", "/proc/net/dev"),
    _counted("network_receive_errors", "Errors while receiving.", "interface", "/proc/net/dev"),
    _counted("network_transmit_errors", "Errors while sending.", "interface", "/proc/net/dev"),
    _counted("network_receive_drops", "Received packets dropped.", "interface", "/proc/net/dev"),
    _counted("network_transmit_drops", "Packets dropped, not sent.", "interface", "/proc/net/dev"),
)


def _process(name: str, kind: Kind, help: str, origin: str, *labels: str, unit: str) -> Metric:
    return Metric(name, kind, help, "host", ("pid", "process", *labels), unit, origin)


_PROCESSES = (
    _process(
        "process_info",
        "gauge",
        "A process that uses a GPU, and what its control groups say of its owner; always 1.",
        "/proc/*/cgroup",
        *("pod_uid", "container_id", "slurm_job"),
        unit="",
    ),
    _process(
        "process_cpu_seconds_total",
        "counter",
        "Processor time of a process that uses a GPU (self), and of the processes that it "
        "started, such as data loader workers (children).",
        "/proc/*/stat",
        "of",
        unit="seconds",
    ),
    _process(
        "process_resident_memory_bytes",
        "gauge",
        "Host memory of a process that uses a GPU (self) and of those that it started (children).",
        "/proc/*/statm",
        "of",
        unit="bytes",
    ),
    _process(
        "process_io_wait_seconds_total",
        "counter",
        "Time for which a process that uses a GPU (self) and those that it started (children) "
        "waited for disks.",
        "/proc/*/stat delayacct_blkio_ticks",
        "of",
        unit="seconds",
    ),
    _process(
        "process_children",
        "gauge",
        "Processes that a process that uses a GPU has started and that live.",
        "/proc/*/stat",
        unit="",
    ),
)

HOST_METRICS = _CPU + _MEMORY + _DISK + _NETWORK + _PROCESSES
