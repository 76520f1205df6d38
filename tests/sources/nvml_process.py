"""The nvml source in a process of its own; prints what it publishes, one JSON object a line."""

from __future__ import annotations

import json
import sys
import threading

from warpwatch.daemon.config import NvmlConfig
from warpwatch.daemon.sources.nvml import NvmlSource
from warpwatch.daemon.supervisor import Supervisor
from warpwatch.telemetry.log import series_text
from warpwatch.telemetry.samples import DeviceSample, HostSample, SourceHealth


class PrintingSink:
    def __init__(self) -> None:
        self._lock = threading.Lock()

    def publish_device(self, sample: DeviceSample) -> None:
        device = sample.device
        self._print(
            device=device.uuid,
            name=device.name,
            info=dict(device.info),
            time=sample.time,
            up=sample.up,
            reason=sample.reason,
            values={series_text(key): value for key, value in sample.values.items()},
            processes=[[p.pid, p.name, p.memory_bytes] for p in sample.processes],
        )

    def forget_device(self, uuid: str) -> None:
        self._print(forget=uuid)

    def publish_health(self, health: SourceHealth) -> None:
        self._print(source=health.name, up=health.up, reason=health.reason)

    def publish_host(self, sample: HostSample) -> None:
        raise AssertionError("nvml knows nothing of the host")

    def _print(self, **fields: object) -> None:
        with self._lock:
            print(json.dumps(fields), flush=True)


if __name__ == "__main__":
    supervisor = Supervisor()
    source = NvmlSource(
        NvmlConfig(interval_s=0.1, stuck_after_s=0.5), retry_interval_s=0.2, probe_interval_s=0.3
    )
    source.start(supervisor, PrintingSink())
    sys.stdin.read()
    supervisor.stop(1.0)
    source.close()
