"""The rows of *Node and GPUs* about processes that use GPUs, and about the host."""

from __future__ import annotations

from warpwatch_dashboards.page import Row
from warpwatch_dashboards.panels import at_most, graph
from warpwatch_dashboards.queries import (
    AGENT,
    DEVICE,
    DEVICE_KEY,
    GPU_LEGEND,
    NODE_LEGEND,
    PLACE,
    Query,
    by_node,
    rate,
    series,
    total,
)

_PROCESS = "{{process}} {{pid}}"


_CPU = rate(series("process_cpu_seconds_total"))
_MEMORY = series("process_resident_memory_bytes")
_BY_POD = total(
    f"{DEVICE_KEY}, namespace, pod, slurm_job",
    f"{series('process_gpu_utilization_ratio', DEVICE)} * on ({PLACE}, pid) "
    f"group_left (namespace, pod, slurm_job) {series('process_info', AGENT)}",
)
_PROCESSES_ROW = Row(
    "Processes on GPUs",
    [
        graph(
            "GPU use by pod",
            "Share of SM time by the pod, or Slurm job, of its processes: who uses a GPU that "
            "several share, by time-slicing or MPS. The daemon must see the host's processes.",
            Query(_BY_POD, f"{GPU_LEGEND} {{{{namespace}}}} {{{{pod}}}} {{{{slurm_job}}}}"),
            unit="percentunit",
            stacked=True,
            width=24,
        ),
        graph(
            "GPU memory by process",
            "Device memory of each process. One that belongs to no job is left over from a "
            "job that has ended.",
            Query(series("process_gpu_memory_bytes", DEVICE), f"{GPU_LEGEND} {_PROCESS}"),
            unit="bytes",
            stacked=True,
        ),
        graph(
            "GPU use by process",
            "Share of SM time that each process used.",
            Query(series("process_gpu_utilization_ratio", DEVICE), f"{GPU_LEGEND} {_PROCESS}"),
            unit="percentunit",
        ),
        graph(
            "Processor by process",
            "Cores in use: by the process (self), and by those it started, such as data loader "
            "workers (children). Self at 1 is a Python program that is bound to its host.",
            by_node(_CPU, "process", "pid", "of"),
        ),
        graph(
            "Host memory by process",
            "Resident host memory of each process on a GPU and of those it started. A steady "
            "climb ends in the kernel's out-of-memory killer.",
            by_node(_MEMORY, "process", "pid", "of"),
            unit="bytes",
        ),
    ],
    width=6,
)


_BUSY = total(PLACE, rate(series("host_cpu_seconds_total", AGENT, 'mode!~"idle|iowait"')))
_CORES = total(PLACE, series("host_cpu_cores"))
_LOAD = total(PLACE, series("host_load_average", AGENT, 'window="5m"'))
_USED = series("host_memory_used_bytes")
_WHOLE = series("host_memory_total_bytes")
_HOST_ROW = Row(
    "Host",
    [
        graph(
            "Processor",
            "Cores in use by the cores there are. Near 100 % data loaders and launches wait.",
            by_node(f"{_BUSY} / {_CORES}"),
            unit="percentunit",
            maximum=1,
            limits=at_most(0.9),
        ),
        graph(
            "Load by core",
            "Processes that run or wait, over five minutes, a core. Above 1 some wait.",
            by_node(f"{_LOAD} / {_CORES}"),
            limits=at_most(1),
        ),
        graph(
            "Memory",
            "Host memory in use by processes and the kernel, without what only caches files.",
            by_node(f"{_USED} / {_WHOLE}"),
            unit="percentunit",
            maximum=1,
            limits=at_most(0.9),
        ),
        graph(
            "Swapping",
            "Bytes a second to and from swap. A training that swaps stands still.",
            Query(rate(series("host_swap_in_bytes_total")), f"{NODE_LEGEND}|in"),
            Query(rate(series("host_swap_out_bytes_total")), f"{NODE_LEGEND}|out"),
            unit="binBps",
        ),
        graph(
            "Pressure",
            "Share of time in which some or all (full) tasks waited for processor, memory or "
            "disks. The resource that rises with data wait is the one to add.",
            by_node(rate(series("host_pressure_seconds_total")), "resource", "kind"),
            unit="percentunit",
            width=12,
        ),
        graph(
            "Shared memory",
            "Shared memory in use; data loaders pass batches through it. Full (often 64 MiB in a "
            "container): workers die with a bus error.",
            by_node(series("host_memory_shared_bytes")),
            unit="bytes",
            width=12,
        ),
    ],
    width=6,
)


_ERRORS = (
    ("receive_errors", "receive errors"),
    ("transmit_errors", "transmit errors"),
    ("receive_drops", "receive drops"),
    ("transmit_drops", "transmit drops"),
)
_TRAFFIC_ROW = Row(
    "Disks and network",
    [
        graph(
            "Disk read",
            "Bytes a second by disk. A plateau under data wait is the disk's limit.",
            by_node(rate(series("host_disk_read_bytes_total")), "device"),
            unit="binBps",
        ),
        graph(
            "Disk written",
            "Bytes a second by disk: checkpoints, logs, traces.",
            by_node(rate(series("host_disk_written_bytes_total")), "device"),
            unit="binBps",
        ),
        graph(
            "Disk busy",
            "Share of time in which a disk was busy. Disks that work on many requests at once "
            "can do more at 100 %.",
            by_node(rate(series("host_disk_busy_seconds_total")), "device"),
            unit="percentunit",
        ),
        graph(
            "Network received",
            "Bytes a second by interface. RDMA passes the kernel by and is not in it.",
            by_node(rate(series("host_network_receive_bytes_total")), "interface"),
            unit="binBps",
        ),
        graph(
            "Network sent",
            "Bytes a second by interface. RDMA passes the kernel by and is not in it.",
            by_node(rate(series("host_network_transmit_bytes_total")), "interface"),
            unit="binBps",
        ),
        graph(
            "Network errors and drops",
            "Packets a second that were damaged or dropped, over a node's interfaces. Above 0 "
            "for long: cable, port, or buffers too small.",
            *(
                Query(
                    total(PLACE, rate(series(f"host_network_{name}_total"))),
                    f"{NODE_LEGEND}|{words}",
                )
                for name, words in _ERRORS
            ),
            unit="pps",
        ),
    ],
)


_PORT = f"{NODE_LEGEND}|{{{{device}}}}/{{{{port}}}}"
_NETWORK_ROW = Row(
    "RDMA network",
    [
        graph(
            "Ports up",
            "1: the port is active. 0 with a cable in it: jobs over several nodes fail.",
            Query(series("network_port_up"), _PORT),
            maximum=1,
        ),
        *(
            graph(
                f"RDMA {words}",
                "Share of what the port can carry.",
                Query(
                    f"{rate(series(f'network_port_{way}_bytes_total'))} / "
                    f"{series('network_port_rate_bytes_per_second')}",
                    _PORT,
                ),
                unit="percentunit",
                maximum=1,
            )
            for way, words in (("receive", "received"), ("transmit", "sent"))
        ),
        graph(
            "RDMA errors",
            "Errors, losses and repetitions a second by counter. What lasts is a cable, a switch "
            "or a peer that died.",
            Query(rate(series("network_port_errors_total")), f"{_PORT} {{{{type}}}}"),
            unit="cps",
            width=12,
        ),
        graph(
            "RDMA congestion",
            "Waiting for credits, ECN marks and CNPs a second: congestion control at work, normal "
            "under load. One port far above the others: its path.",
            Query(rate(series("network_port_congestion_total")), f"{_PORT} {{{{type}}}}"),
            unit="cps",
            width=12,
        ),
    ],
)


HOST_ROWS = [_PROCESSES_ROW, _HOST_ROW, _TRAFFIC_ROW, _NETWORK_ROW]
