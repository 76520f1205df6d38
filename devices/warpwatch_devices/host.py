"""Reads the host: processors, memory, pressure, disks and network, and the daemon's own footprint.

Label sets are bounded by MAX_DEVICES. Only whole disks count, not partitions, loop, ram,
device-mapper, md or zram devices, whose traffic the disks below them contain. Network interfaces of
containers (veth, bridges, overlay) are left out.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import psutil

from warpwatch_devices.config import HostConfig
from warpwatch_devices.memory_groups import read_text
from warpwatch_devices.source import Sink, Source
from warpwatch_runtime.supervisor import LoopRunner
from warpwatch_telemetry.catalogue import CPU_MODES, PRESSURE_RESOURCES
from warpwatch_telemetry.metric import Values
from warpwatch_telemetry.samples import HostSample, SourceHealth

MAX_DEVICES = 64
_PRESSURE = Path("/proc/pressure")
_BLOCK_DEVICES = Path("/sys/block")
_VIRTUAL_DISK = re.compile(r"(loop|ram|zram|dm-|md|sr|fd)\d*")
_VIRTUAL_INTERFACE = re.compile(
    r"(veth|cali|cilium|lxc|lxd|docker|br-|virbr|flannel|cni|tun|tap|kube|nodelocaldns|dummy).*|lo"
)


class HostSource(Source):
    """The source of the host's values; it is up if at least one part could be read."""

    name = "host"

    def __init__(self, config: HostConfig) -> None:
        self._config = config
        self._errors = 0

    def start(self, supervisor: LoopRunner, sink: Sink) -> None:
        supervisor.every("host", self._config.interval_s, lambda: self._read(sink))

    def _read(self, sink: Sink) -> None:
        begun, now = time.monotonic(), time.time()
        values, missing = read_host()
        self._errors += len(missing)
        sink.publish_host(HostSample(now, values))
        reason = f"not readable: {', '.join(missing)}" if missing else ""
        duration_s = time.monotonic() - begun
        sink.publish_health(SourceHealth(self.name, bool(values), reason, duration_s, self._errors))


def read_host() -> tuple[Values, list[str]]:
    """Return all values, and the names of unreadable parts (a container hides some)."""
    values: Values = {}
    missing = []
    for name, read in _PARTS.items():
        try:
            values |= read()
        except (OSError, RuntimeError, psutil.Error):
            missing.append(name)
    return values, missing


def _cpu() -> Values:
    times = psutil.cpu_times()
    values: Values = {
        ("host_cpu_seconds_total", (mode,)): getattr(times, mode)
        for mode in CPU_MODES
        if hasattr(times, mode)
    }
    cores = psutil.cpu_count()
    if cores:
        values["host_cpu_cores", ()] = cores
    for window, load in zip(("1m", "5m", "15m"), os.getloadavg(), strict=True):
        values["host_load_average", (window,)] = round(load, 2)
    values["host_boot_timestamp_seconds", ()] = psutil.boot_time()
    return values


def _memory() -> Values:
    memory, swap = psutil.virtual_memory(), psutil.swap_memory()
    values: Values = {
        ("host_memory_total_bytes", ()): memory.total,
        ("host_memory_available_bytes", ()): memory.available,
        ("host_memory_used_bytes", ()): memory.used,
        ("host_swap_total_bytes", ()): swap.total,
        ("host_swap_used_bytes", ()): swap.used,
        ("host_swap_in_bytes_total", ()): swap.sin,
        ("host_swap_out_bytes_total", ()): swap.sout,
    }
    for name in ("cached", "shared"):
        if hasattr(memory, name):
            values[f"host_memory_{name}_bytes", ()] = getattr(memory, name)
    return values


def _pressure() -> Values:
    """Read PSI, which a kernel may lack."""
    values: Values = {}
    for resource in PRESSURE_RESOURCES:
        for kind, seconds in parse_pressure(read_text(_PRESSURE / resource)).items():
            values["host_pressure_seconds_total", (resource, kind)] = seconds
    return values


def parse_pressure(text: str) -> dict[str, float]:
    """Return the seconds of a pressure file by kind (some, full)."""
    return {
        match[1]: int(match[2]) / 1e6
        for match in re.finditer(r"^(some|full) .*\btotal=(\d+)$", text, re.MULTILINE)
    }


def _disks() -> Values:
    counters = psutil.disk_io_counters(perdisk=True) or {}
    values: Values = {}
    for disk in whole_disks(counters):
        io = counters[disk]
        values["host_disk_read_bytes_total", (disk,)] = io.read_bytes
        values["host_disk_written_bytes_total", (disk,)] = io.write_bytes
        values["host_disk_reads_total", (disk,)] = io.read_count
        values["host_disk_writes_total", (disk,)] = io.write_count
        if hasattr(io, "busy_time"):
            values["host_disk_busy_seconds_total", (disk,)] = io.busy_time / 1000
    return values


def whole_disks(names: Iterable[str]) -> list[str]:
    """Return the disks without partitions: /sys/block lists only whole devices."""
    disks = sorted(name for name in names if not _VIRTUAL_DISK.fullmatch(name))
    if _BLOCK_DEVICES.is_dir():
        disks = [name for name in disks if (_BLOCK_DEVICES / name).exists()]
    return disks[:MAX_DEVICES]


def _network() -> Values:
    counters = psutil.net_io_counters(pernic=True)
    values: Values = {}
    for interface in real_interfaces(counters):
        io = counters[interface]
        values["host_network_receive_bytes_total", (interface,)] = io.bytes_recv
        values["host_network_transmit_bytes_total", (interface,)] = io.bytes_sent
        values["host_network_receive_errors_total", (interface,)] = io.errin
        values["host_network_transmit_errors_total", (interface,)] = io.errout
        values["host_network_receive_drops_total", (interface,)] = io.dropin
        values["host_network_transmit_drops_total", (interface,)] = io.dropout
    return values


def real_interfaces(names: Iterable[str]) -> list[str]:
    return sorted(name for name in names if not _VIRTUAL_INTERFACE.fullmatch(name))[:MAX_DEVICES]


_PROCESS = psutil.Process()


def _agent() -> Values:
    with _PROCESS.oneshot():
        times = _PROCESS.cpu_times()
        return {
            ("agent_resident_memory_bytes", ()): _PROCESS.memory_info().rss,
            ("agent_cpu_seconds_total", ()): times.user + times.system,
            ("agent_open_files", ()): _PROCESS.num_fds(),
            ("agent_threads", ()): _PROCESS.num_threads(),
            ("agent_start_timestamp_seconds", ()): _PROCESS.create_time(),
        }


_PARTS: Mapping[str, Callable[[], Values]] = {
    "cpu": _cpu,
    "memory": _memory,
    "pressure": _pressure,
    "disks": _disks,
    "network": _network,
    "agent": _agent,
}
