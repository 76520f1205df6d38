"""The nvml source with the daemon's loops in a process of its own, until its input ends.

Prints what it publishes, one JSON object a line.
"""

from __future__ import annotations

import json
import sys

from tests.devices.recording import RecordingSink
from warpwatch_daemon.agent.supervisor import Supervisor
from warpwatch_devices.config import NvmlConfig
from warpwatch_devices.nvml import device, scanner, source
from warpwatch_devices.source import Surroundings
from warpwatch_devices.xid_ledger import XidLedger
from warpwatch_telemetry.samples import DeviceSample, SourceHealth


class PrintingSink(RecordingSink):
    def publish_device(self, sample: DeviceSample) -> None:
        names = [name for name, _ in sample.values]
        told = [sample.device.uuid, sample.up, sample.reason, sample.device.index]
        self.print(told, "device_sm_active_ratio" in names)

    def publish_health(self, health: SourceHealth) -> None:
        self.print([health.name, health.up, health.reason, 0], False)

    def print(self, told: list[object], counting: bool) -> None:
        with self.lock:
            print(json.dumps([*told, counting]), flush=True)


def main() -> None:
    source.RETRY_INTERVAL_S = device.PROBE_INTERVAL_S = scanner.INTERVAL_S = 0.2
    around = Surroundings(lambda _: None, tuple, lambda: False, lambda _: None)
    config = NvmlConfig(interval_s=0.1, stuck_after_s=0.5, mismatch_grace_s=3600)
    supervisor, nvml = Supervisor(), source.NvmlSource(config, around, XidLedger())
    nvml.start(supervisor, PrintingSink())
    sys.stdin.read()
    supervisor.stop(1.0)
    nvml.close()
    print(json.dumps(["closed", True, "", 0, False]), flush=True)


if __name__ == "__main__":
    main()
