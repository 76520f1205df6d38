"""Measures the daemon's footprint and scrape latency with 8 devices and 8 ranks.

The devices are simulated; the ranks are real processes with the shim and 20 empty steps per second.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest

from benchmarks.processes import (
    MAX_RSS_MIB,
    LocalDaemon,
    Scraper,
    at_most,
    burst,
    core_percents,
    is_quick,
    latency,
    rss_mib,
    running_daemon,
    scrape_limits,
    start,
    stop,
    wait_until,
)
from warpwatch_devices.simulated import PROFILES, SimulatedDevice
from warpwatch_exporters.collector import StateCollector
from warpwatch_exporters.prometheus import render
from warpwatch_telemetry.state import STEP_DURATION_BOUNDS_S, Histogram, JobState, RankState, State

RANKS = 8
DEVICES = 8
STEPS_PER_S = 20
WINDOW_S, QUICK_WINDOW_S = 60.0, 10.0
SETTLE_S = 3.0
SCRAPES = 300
MAX_CORE_PERCENT = 2.0
JOB = "bench"

_RANK = f"""
import time
import warpwatch
monitor = warpwatch.attach(job="{JOB}")
due = time.monotonic()
while True:
    with monitor.step(samples=8, tokens=1024):
        with monitor.phase("forward"):
            pass
        with monitor.phase("backward"):
            due += {1 / STEPS_PER_S}
            time.sleep(max(0.0, due - time.monotonic()))
"""


def measure() -> dict[str, Any]:
    window_s = QUICK_WINDOW_S if is_quick() else WINDOW_S
    simulated = {"enabled": True, "devices": DEVICES}
    sources = {"nvml": {"enabled": False}, "simulated": simulated}
    with running_daemon(sources=sources) as daemon, ranks_beside(daemon):
        time.sleep(SETTLE_S)
        percents = core_percents({JOB: daemon.pid}, lambda: time.sleep(window_s))
        used_mib = rss_mib(daemon.pid)
        with Scraper(daemon.port, gzip=False) as scraper:
            times_s = burst(scraper, SCRAPES)
            page_bytes = len(scraper.body)
        return {
            "devices": DEVICES,
            "ranks": RANKS,
            "steps_per_s_and_rank": STEPS_PER_S,
            "window_s": window_s,
            "rss_after_scrapes_mib": rss_mib(daemon.pid),
            "page_bytes": page_bytes,
            "scrape": latency(times_s),
            **rendering(DEVICES, RANKS),
            "limits": [
                at_most("percent of a core", round(percents[JOB], 2), MAX_CORE_PERCENT),
                at_most("RSS in MiB", used_mib, MAX_RSS_MIB),
                *scrape_limits("of this node", latency(times_s)),
            ],
        }


@contextlib.contextmanager
def ranks_beside(daemon: LocalDaemon, program: str = _RANK) -> Iterator[None]:
    """Run ranks of JOB until the end of the block, from when the daemon has them all."""
    with contextlib.ExitStack() as stack:
        for rank in range(RANKS):
            own = {"RANK": str(rank), "WORLD_SIZE": str(RANKS)}
            stack.callback(stop, start(["-c", program], daemon.training_environment | own))
        wait_until(lambda: len(daemon.ranks(JOB)) == RANKS)
        yield


RENDERINGS = 200


def rendering(devices: int, ranks: int) -> dict[str, float]:
    """Return the processor time of a page in ms: by our renderer and by prometheus_client alone.

    The difference is why the daemon has its own renderer: 1.2 instead of 14 ms per scrape.
    """
    state = _state(devices, ranks)
    registry = CollectorRegistry()
    registry.register(StateCollector(lambda: state))
    writers: dict[str, Callable[[], bytes]] = {
        "page_ms": lambda: render(state),
        "page_by_prometheus_client_ms": lambda: generate_latest(registry),
    }
    times_s: dict[str, list[float]] = {name: [] for name in writers}
    # In turns, so that other work on the machine is in both.
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
