"""The nvml source, or one device of it, in a process of its own under a fake driver.

``source``: runs the source with the settings in NVML_PROCESS, an object, and prints what it
publishes. ``device``: waits on its input for numbers of rounds, one a line, runs the device at
index 0 that often, and prints the newest of all; ``new`` is another device at that index.
``by_hand``: runs the source's loops whose names it is given, one a line, each once, then prints an
empty object. All print one JSON object a line.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

from warpwatch_daemon.agent.supervisor import Supervisor
from warpwatch_devices import loops
from warpwatch_devices.config import NvmlConfig
from warpwatch_devices.nvml import device as nvml_device
from warpwatch_devices.nvml import scanner
from warpwatch_devices.nvml import source as nvml_source
from warpwatch_devices.nvml.device import Companions, NvmlDevice
from warpwatch_devices.nvml.events import EventWatcher
from warpwatch_devices.nvml.gpm import GpmWorker
from warpwatch_devices.nvml.library import initialise
from warpwatch_devices.nvml.source import NvmlSource
from warpwatch_devices.source import Surroundings
from warpwatch_devices.xid_ledger import XidLedger
from warpwatch_telemetry.attribution import Attribution
from warpwatch_telemetry.samples import DeviceSample, HostSample, SourceHealth
from warpwatch_telemetry.series_text import series_text


def as_object(sample: DeviceSample) -> dict[str, Any]:
    device = sample.device
    return {
        "device": device.uuid,
        "index": device.index,
        "name": device.name,
        "gpu_instance": device.gpu_instance,
        "profile": device.profile,
        "info": dict(device.info),
        "time": sample.time,
        "up": sample.up,
        "reason": sample.reason,
        "values": {series_text(key): value for key, value in sample.values.items()},
        "processes": [[p.pid, p.name, p.memory_bytes, p.sm_ratio] for p in sample.processes],
    }


class PrintingSink:
    def __init__(self) -> None:
        self._lock = threading.Lock()

    def publish_device(self, sample: DeviceSample) -> None:
        self.print(**as_object(sample))

    def forget_device(self, uuid: str, source: str = "nvml") -> None:
        self.print(forget=uuid)

    def publish_health(self, health: SourceHealth) -> None:
        fields = {"up": health.up, "reason": health.reason, "errors": health.errors}
        self.print(source=health.name, **fields)

    def publish_host(self, sample: HostSample) -> None:
        raise AssertionError("nvml knows nothing of the host")

    def publish_processes(self, sample: HostSample) -> None:
        raise AssertionError("nvml knows nothing of the host")

    def publish_attribution(self, attribution: Attribution) -> None:
        raise AssertionError("nvml knows nothing of workloads")

    def count(self, name: str, *labels: str, by: float = 1.0) -> None:
        self.print(count=name, labels=labels, by=by)

    def print(self, **fields: object) -> None:
        with self._lock:
            print(json.dumps(fields), flush=True)


class GatheringSink(PrintingSink):
    """Keeps the newest of everything until it is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.devices: dict[str, Any] = {}
        self.forgotten: list[str] = []
        self.counts: dict[str, float] = {}

    def publish_device(self, sample: DeviceSample) -> None:
        self.devices[sample.device.uuid] = as_object(sample)

    def forget_device(self, uuid: str, source: str = "nvml") -> None:
        self.devices.pop(uuid, None)
        self.forgotten.append(uuid)

    def count(self, name: str, *labels: str, by: float = 1.0) -> None:
        key = " ".join((name, *labels))
        self.counts[key] = self.counts.get(key, 0.0) + by


def start_source(supervisor: loops.Supervisor, settings: dict[str, Any]) -> NvmlSource:
    sink = PrintingSink()
    surroundings = Surroundings(
        load_of=lambda index: None,
        devices=lambda: (),
        counters_wanted=lambda: False,
        fail=lambda line: sink.print(fail=line),
    )
    config = NvmlConfig(**{"interval_s": 0.1, "stuck_after_s": 0.5, **settings})
    nvml_source.RETRY_INTERVAL_S = 0.2
    nvml_device.PROBE_INTERVAL_S = scanner.INTERVAL_S = 0.3
    source = NvmlSource(config, surroundings, XidLedger())
    source.start(supervisor, sink)
    return source


class LoopByHand:
    """A loop that goes round when it is told to."""

    alive = False
    busy_s = last_duration_s = 0.0

    def __init__(self, interval_s: float, step: Callable[[], None]) -> None:
        self.interval_s, self.step = interval_s, step

    def wake(self) -> None: ...

    def stop(self, timeout_s: float = 0.0) -> None: ...


class LoopsByHand:
    def __init__(self) -> None:
        self.loops: dict[str, LoopByHand] = {}

    def every(self, name: str, interval_s: float, step: Callable[[], None]) -> LoopByHand:
        self.loops[name] = LoopByHand(interval_s, step)
        return self.loops[name]


def run_by_hand(settings: dict[str, Any]) -> None:
    supervisor = LoopsByHand()
    start_source(supervisor, settings)
    for line in sys.stdin:
        supervisor.loops[line.strip()].step()
        print("{}", flush=True)


def run_device(supervisor: Supervisor) -> None:
    initialise()
    for line in sys.stdin:
        if line == "new\n":
            sink, ledger = GatheringSink(), XidLedger()
            events, gpm = EventWatcher(supervisor, sink, ledger), GpmWorker(supervisor, 1.0, 5.0)
            companions = Companions(sink, ledger, events, gpm)
            nvml_device.PROBE_INTERVAL_S = 0.0
            device = NvmlDevice(0, companions, interval_s=1.0)
            continue
        for _ in range(int(line)):
            device.step()
        device.costs.drain(sink.count)
        sink.print(devices=sink.devices, forgotten=sink.forgotten, counts=sink.counts)


if __name__ == "__main__":
    supervisor = Supervisor()
    settings = json.loads(os.environ.get("NVML_PROCESS", "{}"))
    if sys.argv[1] == "device":
        run_device(supervisor)
    elif sys.argv[1] == "by_hand":
        run_by_hand(settings)
    else:
        source = start_source(supervisor, settings)
        sys.stdin.read()
        supervisor.stop(1.0)
        source.close()
