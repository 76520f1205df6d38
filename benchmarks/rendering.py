"""What a page of metrics costs to write: by our renderer, and by prometheus_client alone."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

from prometheus_client import CollectorRegistry, generate_latest

from warpwatch_devices.simulated.device import SimulatedDevice
from warpwatch_devices.simulated.profiles import PROFILES
from warpwatch_exporters.collector import StateCollector
from warpwatch_exporters.prometheus import render
from warpwatch_telemetry.state import (
    STEP_DURATION_BOUNDS_S,
    Histogram,
    JobState,
    RankState,
    State,
)

RENDERINGS = 200


def rendering(devices: int, ranks: int) -> dict[str, float]:
    """Processor time in ms of a node's page: the daemon's way, and by prometheus_client alone.

    What the second takes is why the daemon has a renderer of its own: with 8 devices and 8 ranks
    14 ms against 1.2 on a busy core, at each scrape of each node.
    """
    state = _state(devices, ranks)
    registry = CollectorRegistry()
    registry.register(StateCollector(lambda: state))
    writers: dict[str, Callable[[], bytes]] = {
        "page_ms": lambda: render(state),
        "page_by_prometheus_client_ms": lambda: generate_latest(registry),
    }
    times_s: dict[str, list[float]] = {name: [] for name in writers}
    # In turns: what else the machine does then is in both.
    for _ in range(RENDERINGS):
        for name, write in writers.items():
            began = time.thread_time()
            write()
            times_s[name].append(time.thread_time() - began)
    return {name: round(1000 * statistics.median(each), 3) for name, each in times_s.items()}


def _state(devices: int, ranks: int) -> State:
    now = time.time()
    simulated = [SimulatedDevice(index, PROFILES["h100"]) for index in range(devices)]
    steps = Histogram((10,) * (len(STEP_DURATION_BOUNDS_S) + 1), 100.0)
    phases_s = dict.fromkeys(("data_wait", "forward", "backward", "optimizer", "comm"), 1.5)
    return State(
        now,
        "",
        "node",
        devices=tuple(device.advance(now, 1.0, 0.9) for device in simulated),
        ranks=tuple(
            RankState("job", number, str(number), 1, "node", durations=steps, phases_s=phases_s)
            for number in range(ranks)
        ),
        jobs=(JobState("job", ranks, tuple(str(number) for number in range(ranks))),),
    )
