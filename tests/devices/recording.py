"""A sink that keeps what sources publish."""

import threading
from collections import defaultdict

from warpwatch_telemetry.samples import Attribution, DeviceSample, HostSample, SourceHealth


class RecordingSink:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.devices: dict[str, list[DeviceSample]] = {}
        self.forgotten: list[str] = []
        self.hosts: list[HostSample] = []
        self.healths: list[SourceHealth] = []
        self.processes: list[HostSample] = []
        self.attributions: list[Attribution] = []
        self.counts: dict[tuple[str, ...], float] = defaultdict(float)

    def publish_device(self, sample: DeviceSample) -> None:
        with self.lock:
            self.devices.setdefault(sample.device.uuid, []).append(sample)

    def forget_device(self, uuid: str, source: str = "nvml") -> None:
        with self.lock:
            # Only who has published a device ends its series.
            if uuid in self.devices and self.devices[uuid][-1].source == source:
                del self.devices[uuid]
            self.forgotten.append(uuid)

    def publish_host(self, sample: HostSample) -> None:
        self.hosts.append(sample)

    def publish_processes(self, sample: HostSample) -> None:
        self.processes.append(sample)

    def publish_attribution(self, attribution: Attribution) -> None:
        self.attributions.append(attribution)

    def count(self, name: str, *labels: str, by: float = 1.0) -> None:
        with self.lock:
            self.counts[(name, *labels)] += by

    def publish_health(self, health: SourceHealth) -> None:
        self.healths.append(health)
