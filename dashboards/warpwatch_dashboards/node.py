"""*Node and GPUs*: one node or several, device by device, with processes and the host.

The panels about one metric of the devices each are the rows of device_panels.csv.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from grafana_foundation_sdk.models import dashboard as models

from warpwatch_dashboards import links, variables
from warpwatch_dashboards.page import Page, Row, rows_of
from warpwatch_dashboards.panels import (
    EMPTY_WHEN_HEALTHY,
    Column,
    Limits,
    PanelSize,
    at_least,
    at_most,
    graph,
    table,
)
from warpwatch_dashboards.queries import (
    AGENT,
    DEVICE,
    DEVICE_KEY,
    GPU_LEGEND,
    NODE_LEGEND,
    PLACE,
    WINDOW,
    Query,
    anomalies,
    by_node,
    grown,
    rate,
    series,
    total,
)


def page() -> Page:
    return Page(
        uid=links.NODE,
        title="Warpwatch / Node and GPUs",
        description="GPUs and MIG instances by family of metrics, processes and the host.",
        variables=[
            variables.datasource(),
            variables.cluster(),
            variables.node(),
            variables.one_instance(),
            variables.gpu(),
        ],
        annotations=variables.marks_of_agents(),
        rows=[
            _OVERVIEW_ROW,
            *rows_of("device_panels.csv", _panel, collapsed=True),
            _PROCESSES_ROW,
            _HOST_ROW,
            _TRAFFIC_ROW,
            _NETWORK_ROW,
        ],
    )


_METRIC = re.compile(r"(\w+)(?:\{(.*?)\})?")


def _panel(row: Mapping[str, str]) -> models.Panel:
    """Return the panel of a row.

    show: a gauge as it is, the rate of a counter, its growth if it counts rare events, or the sum
    over devices. metric: one, or two of which the first is divided by the second. label: one of
    the metric's own, with a line for each value. colors: each up to the number after it.
    """
    metrics = [series(name, DEVICE, *filter(None, [own])) for name, own in _metrics(row)]
    promql, label, description = " / ".join(metrics), row["label"], row["description"]
    query = _by_device(promql, label)
    if row["show"] == "rate":
        query = _by_device(rate(promql), label)
    elif row["show"] == "growth":
        by = f"{DEVICE_KEY}, {label}" if label else DEVICE_KEY
        query = _by_device(total(by, grown(promql, WINDOW)), label)
        description += f" {EMPTY_WHEN_HEALTHY}"
    elif row["show"] == "sum":
        query = Query(total(label, promql), f"{{{{{label}}}}}")
    return graph(row["title"], description, query, **_size(row))


def _metrics(row: Mapping[str, str]) -> list[tuple[str, str]]:
    return _METRIC.findall(row["metric"])


def _size(row: Mapping[str, str]) -> PanelSize:
    size: PanelSize = {"unit": row["unit"] or "none", "width": int(row["width"] or 0)}
    if row["unit"] == "share":
        size |= {"unit": "percentunit", "maximum": 1}
    if row["colors"]:
        colors, numbers = row["colors"].split()[::2], row["colors"].split()[1::2]
        limits: Limits = list(zip([None, *map(json.loads, numbers)], colors, strict=True))
        size["limits"] = limits
    return size


def _by_device(expression: str, label: str = "") -> Query:
    return Query(expression, f"{GPU_LEGEND} {{{{{label}}}}}" if label else GPU_LEGEND)


def _at_a_glance() -> list[models.Panel]:
    """Return a line per GPU: load, power, temperature, memory."""
    used, whole = (series(f"device_memory_{of}_bytes", DEVICE) for of in ("used", "total"))
    busy = rate(series("device_busy_seconds_total", DEVICE))
    heat = series("device_temperature_celsius", DEVICE, 'sensor="gpu"')
    shown = (
        ("Use", "Share of time in which a kernel ran.", "percentunit", busy),
        ("Power drawn", "What each GPU draws.", "watt", series("device_power_watts", DEVICE)),
        ("Heat", "Temperature of each GPU.", "celsius", heat),
        ("Memory full", "Memory in use by what it has.", "percentunit", f"{used} / {whole}"),
    )
    return [
        graph(title, words, _by_device(promql), unit=unit, width=6)
        for title, words, unit, promql in shown
    ]


def _devices() -> models.Panel:
    memory = series("device_memory_used_bytes", DEVICE)
    whole = series("device_memory_total_bytes", DEVICE)
    hottest = series("device_temperature_celsius", DEVICE, 'sensor="gpu"')
    owners = (
        f"{series('device_workload_info', DEVICE)} or {series('device_slurm_job_info', DEVICE)}"
    )
    values = [
        Column(series("device_up", DEVICE), "Up", "none", at_least(1)),
        Column(rate(series("device_busy_seconds_total", DEVICE)), "Busy", "percentunit"),
        Column(f"{memory} / {whole}", "Memory", "percentunit", at_most(0.9)),
        Column(series("device_power_watts", DEVICE), "Power", "watt"),
        Column(hottest, "Temperature", "celsius"),
    ]
    described = f"{DEVICE_KEY}, name, driver_version"
    return table(
        "GPUs and MIG instances",
        "One line a device: what it is, who has it, how it does. Up is 0 where it cannot be read.",
        [
            Column(f"max by ({described}) ({series('device_info', DEVICE)})"),
            Column(f"max by ({DEVICE_KEY}, namespace, pod, slurm_job) ({owners})"),
            *(
                Column(f"max by ({DEVICE_KEY}) ({c.promql})", c.title, c.unit, c.limits)
                for c in values
            ),
        ],
        width=24,
    )


_OVERVIEW_ROW = Row(
    "GPUs",
    [
        *_at_a_glance(),
        _devices(),
        table(
            "Anomalies now",
            "What is wrong with these nodes, their GPUs and ranks. The agent's page has the "
            f"evidence and the capture. {EMPTY_WHEN_HEALTHY}",
            [Column(f"{anomalies()} == 1")],
            hidden=["__name__", "job", "uuid", "link"],
            width=16,
            links=[links.job_of_row()],
        ),
        graph(
            "MIG",
            "GPUs and MIG instances by profile; a GPU without a profile is a whole one. It "
            "changes when a GPU is partitioned again.",
            Query(f"count by (profile) ({series('device_up', DEVICE)})", "GPU {{profile}}"),
            stacked=True,
        ),
    ],
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
    collapsed=True,
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
    collapsed=True,
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
    collapsed=True,
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
    collapsed=True,
)
