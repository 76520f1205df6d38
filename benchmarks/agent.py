"""The daemon's footprint: 8 devices and 8 ranks at 20 steps a second, and its scrape latency.

The devices are simulated; the ranks are real processes with the real shim and an empty step.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

from benchmarks.limits import MAX_RSS_MIB, at_most, scrape_limits
from benchmarks.node import LocalDaemon, running_daemon
from benchmarks.processes import core_percents, is_quick, memory, start, stop, wait_until
from benchmarks.rendering import rendering
from benchmarks.scraping import Scraper, burst, latency

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
        rss_mib = memory(daemon.pid).rss_mib
        with Scraper(daemon.port, gzip=False) as scraper:
            times_s = burst(scraper, SCRAPES)
            page_bytes = len(scraper.body)
        return {
            "devices": DEVICES,
            "ranks": RANKS,
            "steps_per_s_and_rank": STEPS_PER_S,
            "window_s": window_s,
            "rss_after_scrapes_mib": memory(daemon.pid).rss_mib,
            "page_bytes": page_bytes,
            "scrape": latency(times_s),
            **rendering(DEVICES, RANKS),
            "limits": [
                at_most("percent of a core", round(percents[JOB], 2), MAX_CORE_PERCENT),
                at_most("RSS in MiB", rss_mib, MAX_RSS_MIB),
                *scrape_limits("of this node", latency(times_s)),
            ],
        }


@contextlib.contextmanager
def ranks_beside(daemon: LocalDaemon) -> Iterator[None]:
    """All of them known to the daemon; ended at the end of the block."""
    with contextlib.ExitStack() as stack:
        for rank in range(RANKS):
            own = {"RANK": str(rank), "WORLD_SIZE": str(RANKS)}
            stack.callback(stop, start(["-c", _RANK], daemon.training_environment | own))
        wait_until(lambda: len(daemon.ranks(JOB)) == RANKS)
        yield
