"""A daemon on the fake driver, as real processes, for tests of the device side as a whole."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.devices.fakenvml.driver import FakeDriver
from tests.loop.node import LoopNode, poll

INTERVAL_S = 0.1
# All that is read of devices, and nothing else.
SOURCES: dict[str, Any] = {
    "nvml": {"interval_s": INTERVAL_S, "stuck_after_s": 0.5, "mismatch_grace_s": 1.0},
    "host": {"enabled": False},
    "processes": {"enabled": False},
    "kernel_log": {"enabled": False},
}


@contextmanager
def device_node(folder: Path, driver: FakeDriver, **config: Any) -> Iterator[LoopNode]:
    """Started, its devices not necessarily read yet."""
    attribution = {"kubelet_socket": "off", "slurm": "off"}
    log = {"jsonl": {"path": str(folder / "log.jsonl")}}
    config = {"sources": SOURCES, "attribution": attribution, "exporters": log} | config
    node = LoopNode(folder, **config)
    try:
        node.start_daemon(wait=True, **driver.environment)
        yield node
    finally:
        node.close()


def devices(node: LoopNode) -> dict[int, dict[str, Any]]:
    """Whole GPUs by index."""
    return {d["index"]: d for d in node.get("devices") if not d["gpu_instance"]}


def all_up(node: LoopNode, count: int) -> bool:
    found = devices(node)
    return len(found) == count and all(device["up"] for device in found.values())


def wait_all_up(node: LoopNode, count: int) -> None:
    poll(lambda: all_up(node, count), "all devices are up")


def reasons(node: LoopNode) -> dict[int, str]:
    """Of the devices that are down, why."""
    return {index: d["reason"] for index, d in devices(node).items() if not d["up"]}


def readings(folder: Path, since: float, until: float) -> dict[str, int]:
    """Good readings of each device in the telemetry log within a span of wall clock."""
    counts: dict[str, int] = {}
    with (folder / "log.jsonl").open(encoding="utf-8") as log:
        for line in log:
            record = json.loads(line) if line.endswith("\n") else {}
            good = record.get("type") == "device" and record.get("up", True)
            if good and since <= record["time"] < until:
                counts[record["device"]] = counts.get(record["device"], 0) + 1
    return counts


def watch(span_s: float) -> tuple[float, float]:
    """Let time pass; the span in wall clock."""
    begun = time.time()
    time.sleep(span_s)
    return begun, time.time()
