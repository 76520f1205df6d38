"""GPM and events of all devices in a process of its own, without the rest of the NVML source.

Prints what it knows twenty times a second, one JSON object a line, until its input ends.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pynvml

from tests.devices.recording import RecordingSink
from warpwatch_daemon.agent.supervisor import Supervisor
from warpwatch_devices import kernel_log
from warpwatch_devices.nvml import gpm
from warpwatch_devices.nvml.events import EventWatcher
from warpwatch_devices.nvml.library import initialise
from warpwatch_devices.xid_ledger import XidLedger
from warpwatch_telemetry.metric import SeriesKey
from warpwatch_telemetry.series_text import series_text

STUCK_AFTER_S = 0.5


def texts(values: dict[SeriesKey, float]) -> dict[str, float]:
    return {series_text(key): value for key, value in values.items()}


class Parts:
    """``options``: gpm_interval_s, take_back_after_s, events, kernel_log (a path)."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.supervisor = Supervisor()
        self.sink = RecordingSink()
        self.ledger = XidLedger()
        self.watcher = EventWatcher(self.supervisor, self.sink, self.ledger)
        gpm.TAKE_BACK_AFTER_S = options.get("take_back_after_s", gpm.TAKE_BACK_AFTER_S)
        interval_s = options.get("gpm_interval_s", 0.2)
        self.worker = gpm.GpmWorker(self.supervisor, interval_s, STUCK_AFTER_S)
        self.events = options.get("events", False)
        self.gpm = "gpm_interval_s" in options
        self.log = None
        if "kernel_log" in options:
            kernel_log.INTERVAL_S = 0.1
            self.log = kernel_log.KernelLogSource(self.ledger, Path(options["kernel_log"]))
            self.log.start(self.supervisor, self.sink)
        self.uuids: list[str] = []

    def add_all(self) -> None:
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            uuid = pynvml.nvmlDeviceGetUUID(handle)
            self.uuids.append(uuid)
            if self.events:
                address = pynvml.nvmlDeviceGetPciInfo(handle).busId
                self.watcher.register(uuid, address, handle)
            if self.gpm:
                self.worker.add(uuid, handle)
                self.add_instances(handle)

    def add_again(self) -> None:
        """As soon as every device answers."""
        while True:
            try:
                self.uuids.clear()
                self.add_all()
                return
            except pynvml.NVMLError:
                time.sleep(0.02)

    def register(self, uuid: str) -> None:
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        self.watcher.register(uuid, pynvml.nvmlDeviceGetPciInfo(handle).busId, handle)

    def add_instances(self, parent: Any) -> None:
        for place in range(8):
            try:
                handle = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(parent, place)
            except pynvml.NVMLError:
                continue
            uuid = pynvml.nvmlDeviceGetUUID(handle)
            instance = pynvml.nvmlDeviceGetGpuInstanceId(handle)
            self.worker.add(uuid, handle, instance, parent)
            self.uuids.append(uuid)

    def report(self) -> None:
        self.worker.watch()
        self.watcher.watch(STUCK_AFTER_S)
        state = {
            "gpm": {uuid: texts(self.worker.values(uuid)) for uuid in self.uuids},
            "given_up": sorted(self.worker.given_up),
            "ledger": {uuid: texts(self.ledger.values(uuid)) for uuid in self.uuids},
            "errors": {" ".join(key): count for key, count in self.sink.counts.items()},
            "in_flight": self.worker.in_flight,
            "trouble": self.watcher.trouble,
            "time": time.monotonic(),
        }
        print(json.dumps(state), flush=True)

    def obey(self, command: str, uuid: str) -> None:
        if command == "remove":
            self.worker.remove(uuid)
        elif command == "forget":
            self.watcher.forget(uuid)
        elif command == "again":
            self.add_again()
        elif command == "register":
            self.register(uuid)

    def close(self) -> None:
        self.worker.close()
        self.watcher.close()
        if self.log is not None:
            self.log.close()


def listen(parts: Parts, over: threading.Event) -> None:
    for line in sys.stdin:
        command, _, uuid = line.strip().partition(" ")
        parts.obey(command, uuid)
    over.set()


if __name__ == "__main__":
    initialise()
    parts = Parts(json.loads(sys.argv[1]))
    parts.add_all()
    over = threading.Event()
    threading.Thread(target=listen, args=(parts, over), daemon=True).start()
    while not over.wait(0.05):
        parts.report()
    parts.close()
    print(json.dumps({"closed": True}), flush=True)
    # A thread that is stuck in the driver must not keep the process.
    sys.stdout.flush()
    os._exit(0)
