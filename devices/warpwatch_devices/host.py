"""Reads the host, the daemon's own footprint, and the ports of RDMA devices.

The host's label sets are bounded by MAX_DEVICES. Only whole disks count, not partitions, loop, ram,
device-mapper, md or zram devices, whose traffic the disks below them contain. Network interfaces of
containers (veth, bridges, overlay) are left out.

Ports of InfiniBand, RoCE and EFA are in /sys/class/infiniband. A missing or invalid file is absent,
never 0: containers with a network of their own have no counters there, and drivers differ. Error
counters stop at their maximum (IBTA: 4, 8 or 16 bits), so only growth counts.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import psutil

from warpwatch_devices.config import HostConfig
from warpwatch_devices.memory_groups import read_text
from warpwatch_devices.source import Sink, Source, SourceContext
from warpwatch_runtime.supervisor import LoopRunner
from warpwatch_telemetry.catalogue import CONGESTION, CPU_MODES, ERRORS, PRESSURE_RESOURCES
from warpwatch_telemetry.metric import SeriesKey, Values
from warpwatch_telemetry.samples import HostSample, SourceHealth

MAX_DEVICES = 64
_PRESSURE = Path("/proc/pressure")
_BLOCK_DEVICES = Path("/sys/block")
_VIRTUAL_DISK = re.compile(r"(loop|ram|zram|dm-|md|sr|fd)\d*")
_VIRTUAL_INTERFACE = re.compile(
    r"(veth|cali|cilium|lxc|lxd|docker|br-|virbr|flannel|cni|tun|tap|kube|nodelocaldns|dummy"
    r"|eni[0-9a-f]{6,}|gke[0-9a-f]{6,}|azv|vxlan|genev_sys|ovn|nerdctl|podman).*|lo"
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


SYS = Path("/sys")
# Reading the counters of some devices asks their firmware.
NETWORK_INTERVAL_S = 5.0
MAX_PORTS = 64
# port_{xmit,rcv}_data counts words; EFA's own counters are bytes.
_WORD_BYTES = 4
_RATE = re.compile(r"([0-9.]+) Gb/sec")


class NetworkSource(Source):
    name = "network"

    def __init__(self, context: SourceContext, sys: Path = SYS) -> None:
        self._devices = context.devices
        self._sys = sys
        # Ports that were seen: one that is not listed any more is down, unless it is a virtual
        # function's, which may have been moved into a pod.
        self._known: dict[str, Values] = {}
        self._virtual: set[str] = set()

    def start(self, supervisor: LoopRunner, sink: Sink) -> None:
        supervisor.every(self.name, NETWORK_INTERVAL_S, lambda: self._read(sink))

    def _read(self, sink: Sink) -> None:
        begun, now = time.monotonic(), time.time()
        ports = dict(read_ports(self._sys))
        for port in self._known.keys() - ports.keys() - self._virtual:
            ports[port] = {("network_port_up", tuple(port.split("/"))): 0}
        if not (ports or self._known):
            return
        self._known, self._virtual = ports, set(filter(self._is_virtual, ports))
        near = dict(self._near_gpus(ports))
        values = {key: value for port in ports.values() for key, value in port.items()}
        sink.publish_host(HostSample(now, values | near, self.name, ports))
        sink.publish_health(SourceHealth(self.name, True, "", time.monotonic() - begun))

    def _is_virtual(self, port: str) -> bool:
        device = self._sys / "class/infiniband" / port.split("/")[0]
        return (device / "device/physfn").exists()

    def _near_gpus(self, ports: dict[str, Values]) -> Iterator[tuple[SeriesKey, float]]:
        buses = {
            sample.device.uuid: _address(sample.device.info.get("pci_bus_id", ""))
            for sample in self._devices()
            if not sample.device.gpu_instance
        }
        for port in ports:
            device, number = port.split("/")
            own = (self._sys / "class/infiniband" / device / "device").resolve()
            for uuid, bus in buses.items():
                gpu = (self._sys / "bus/pci/devices" / bus).resolve()
                if is_near(own.parts, gpu.parts):
                    yield ("network_port_gpu_info", (device, number, uuid)), 1


def read_ports(sys: Path) -> Iterator[tuple[str, Values]]:
    """Yield the values of each port, by ``<device>/<number>``."""
    for folder in sorted(sys.glob("class/infiniband/*/ports/*"))[:MAX_PORTS]:
        device, number = folder.parts[-3], folder.name
        values = _port(folder)
        if values:
            own = {(name, (device, number, *labels)): v for (name, labels), v in values.items()}
            yield f"{device}/{number}", own


def _port(folder: Path) -> Values:
    values: Values = {}
    state, layer = _text(folder / "state"), _text(folder / "link_layer")
    if not state:
        return values
    hca, firmware = (_text(folder.parents[1] / name) for name in ("hca_type", "fw_ver"))
    values["network_port_info", (layer, hca, firmware)] = 1
    values["network_port_up", ()] = int(state.startswith("4:"))
    rate = _RATE.match(_text(folder / "rate"))
    if rate:
        values["network_port_rate_bytes_per_second", ()] = float(rate[1]) * 1e9 / 8
    for way, counter, own in (
        ("receive", "port_rcv_data", "rx"),
        ("transmit", "port_xmit_data", "tx"),
    ):
        words, count = (
            _number(folder / "counters" / counter),
            _number(folder / f"hw_counters/{own}_bytes"),
        )
        total = words * _WORD_BYTES if words is not None else count
        if total is not None:
            values[f"network_port_{way}_bytes_total", ()] = total
    for name, files in (("errors", ERRORS), ("congestion", CONGESTION)):
        for file in files:
            counted = _number(folder / file)
            if counted is not None:
                values[f"network_port_{name}_total", (file.rpartition("/")[2],)] = counted
    return values


def is_near(one: tuple[str, ...], other: tuple[str, ...]) -> bool:
    """Return whether two PCI devices meet in a bridge below the host's own (NCCL: PIX, PXB)."""
    shared = 0
    while shared < min(len(one), len(other)) and one[shared] == other[shared]:
        shared += 1
    roots = [index for index, part in enumerate(one) if part.startswith("pci")]
    return bool(roots) and shared > roots[0] + 1


def _address(bus_id: str) -> str:
    """Return NVML's address as /sys spells it: a domain of four digits, lower case."""
    return bus_id.lower()[-12:]


def _text(path: Path) -> str:
    return read_text(path).strip()


def _number(path: Path) -> float | None:
    text = _text(path)
    return float(text) if text.isdecimal() else None
