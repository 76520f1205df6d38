"""Reads the ports of RDMA devices (InfiniBand, RoCE, EFA) from /sys/class/infiniband.

A missing or invalid file is absent, never 0. Containers with a network of their own have no
counters there, and drivers differ. Error counters stop at their maximum (IBTA: 4, 8 or 16 bits), so
only growth counts.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path

from warpwatch_devices.memory_groups import read_text
from warpwatch_devices.source import Sink, Source, SourceContext
from warpwatch_runtime.supervisor import LoopRunner
from warpwatch_telemetry.catalogue import CONGESTION, ERRORS
from warpwatch_telemetry.metric import SeriesKey, Values
from warpwatch_telemetry.samples import HostSample, SourceHealth

SYS = Path("/sys")
# Reading the counters of some devices asks their firmware.
INTERVAL_S = 5.0
MAX_PORTS = 64
# port_{xmit,rcv}_data counts words; EFA's own counters are bytes.
_WORD_BYTES = 4
_RATE = re.compile(r"([0-9.]+) Gb/sec")


class NetworkSource(Source):
    name = "network"

    def __init__(self, context: SourceContext, sys: Path = SYS) -> None:
        self._devices = context.devices
        self._sys = sys
        # Ports that were seen: one that is not listed any more is down.
        self._known: dict[str, Values] = {}

    def start(self, supervisor: LoopRunner, sink: Sink) -> None:
        supervisor.every(self.name, INTERVAL_S, lambda: self._read(sink))

    def _read(self, sink: Sink) -> None:
        begun, now = time.monotonic(), time.time()
        ports = dict(read_ports(self._sys))
        for port in self._known.keys() - ports.keys():
            ports[port] = {("network_port_up", tuple(port.split("/"))): 0}
        if not ports:
            return
        self._known = ports
        near = dict(self._near_gpus(ports))
        values = {key: value for port in ports.values() for key, value in port.items()}
        sink.publish_host(HostSample(now, values | near, self.name, ports))
        sink.publish_health(SourceHealth(self.name, True, "", time.monotonic() - begun))

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
                if bus and is_near(own.parts, gpu.parts):
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
