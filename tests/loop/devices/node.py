"""A daemon on the fake driver, as real processes, for tests of the device side as a whole."""

import itertools
import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.devices.fakenvml.driver import FakeDriver
from tests.loop.node import LoopNode, loop_node, poll

INTERVAL_S = 0.1
# All that is read of devices, and nothing else.
SOURCES: dict[str, Any] = {
    "nvml": {"interval_s": INTERVAL_S, "stuck_after_s": 2.0, "mismatch_grace_s": 1.0},
    "host": {"enabled": False}, "processes": {"enabled": False}, "kernel_log": {"enabled": False},
}  # fmt: skip


@contextmanager
def device_node(folder: Path, driver: FakeDriver, **config: Any) -> Iterator[LoopNode]:
    """Started, its devices not necessarily read yet."""
    attribution = {"kubelet_socket": "off", "slurm": "off"}
    log = {"jsonl": {"path": str(folder / "log.jsonl")}}
    config = {"sources": SOURCES, "attribution": attribution, "exporters": log} | config
    with loop_node(folder, **config) as node:
        node.start_daemon(wait=True, **driver.environment)
        yield node


def devices(node: LoopNode) -> dict[int, dict[str, Any]]:
    return {d["index"]: d for d in node.get("devices") if not d["gpu_instance"]}


def all_up(node: LoopNode, count: int) -> bool:
    found = devices(node)
    return len(found) == count and all(device["up"] for device in found.values())


def wait_all_up(node: LoopNode, count: int) -> None:
    poll(lambda: all_up(node, count), "all devices are up")


def reasons(node: LoopNode) -> dict[int, str]:
    return {index: d["reason"] for index, d in devices(node).items() if not d["up"]}


def readings(folder: Path, after: int = 0) -> Counter[str]:
    """Good readings of each device in the telemetry log, but for its first ``after`` lines."""
    counts: Counter[str] = Counter()
    with (folder / "log.jsonl").open(encoding="utf-8") as log:
        for line in itertools.islice(log, after, None):
            record = json.loads(line) if line.endswith("\n") else {}
            if record.get("type") == "device" and record.get("up", True):
                counts[record["device"]] += 1
    return counts


def lines_of(folder: Path) -> int:
    return (folder / "log.jsonl").read_bytes().count(b"\n")
