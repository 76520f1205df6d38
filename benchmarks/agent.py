"""The daemon's footprint: 8 devices and 8 ranks at 20 steps a second, and its scrape latency.

The devices are simulated; the ranks are real processes with the real shim and an empty step.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import yaml

from benchmarks.processes import clean_environment, start, wait_until
from benchmarks.scraping import rendering
from warpwatch_daemon.api_client import ApiClient
from warpwatch_daemon.demo.processes import free_port

RANKS = 8
DEVICES = 8
STEPS_PER_S = 20
WINDOW_S = float(os.environ.get("WARPWATCH_BENCH_WINDOW_S", "60"))
SCRAPES = 300
LIMITS = {"rss_mib": 64.0, "cpu_percent_of_a_core": 2.0, "scrape_p50_ms": 2.0}

_RANK = """
import sys, time
import warpwatch
monitor = warpwatch.attach(job="bench")
period = 1 / float(sys.argv[1])
due = time.monotonic()
while True:
    with monitor.step(samples=8, tokens=1024):
        with monitor.phase("forward"):
            pass
        with monitor.phase("backward"):
            due += period
            time.sleep(max(0.0, due - time.monotonic()))
"""


def measure() -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="warpwatch-bench-") as folder, node(Path(folder)) as n:
        daemon, port = n
        process = psutil.Process(daemon.pid)
        before, began = process.cpu_times(), time.monotonic()
        time.sleep(WINDOW_S)
        after, elapsed_s = process.cpu_times(), time.monotonic() - began
        cpu_s = (after.user + after.system) - (before.user + before.system)
        idle_rss = process.memory_info().rss
        latencies, size = scrape(port)
        return {
            "devices": DEVICES,
            "ranks": RANKS,
            "steps_per_s_and_rank": STEPS_PER_S,
            "window_s": round(elapsed_s, 1),
            "cpu_percent_of_a_core": round(100 * cpu_s / elapsed_s, 2),
            "rss_mib": round(idle_rss / 2**20, 1),
            "rss_after_scrapes_mib": round(process.memory_info().rss / 2**20, 1),
            "scrape_bytes": size,
            "scrape_p50_ms": round(1000 * statistics.median(latencies), 3),
            "scrape_p99_ms": round(1000 * statistics.quantiles(latencies, n=100)[98], 3),
            **rendering(DEVICES, RANKS),
            "limits": LIMITS,
        }


@contextlib.contextmanager
def node(folder: Path) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A daemon and its ranks, all reporting."""
    port = free_port()
    config = {
        "http": {"listen": f"127.0.0.1:{port}"},
        "rendezvous": {"dir": str(folder / "run"), "inbox": str(folder / "inbox")},
        "sources": {
            "nvml": {"enabled": False},
            "simulated": {"enabled": True, "devices": DEVICES},
        },
        "store": {"url": (folder / "captures").as_uri()},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    environment = clean_environment()
    arguments = ["-m", "warpwatch_daemon", "daemon", "--config", str(folder / "config.yaml")]
    processes = [start(arguments, environment)]
    try:
        api = ApiClient(f"http://127.0.0.1:{port}")
        wait_until(lambda: api.get("/healthz"))
        for rank in range(RANKS):
            own = {"RANK": str(rank), "WORLD_SIZE": str(RANKS), "WARPWATCH_DIR": config_dir(config)}
            processes.append(start(["-c", _RANK, str(STEPS_PER_S)], environment | own))
        wait_until(lambda: len(api.get("/api/v1/ranks")["ranks"]) == RANKS)
        time.sleep(3)
        yield processes[0], port
    finally:
        for process in reversed(processes):
            process.kill()
            process.wait()


def config_dir(config: dict[str, Any]) -> str:
    return str(config["rendezvous"]["dir"])


def scrape(port: int) -> tuple[list[float], int]:
    """Seconds of each scrape over one kept connection, and the size of the last body."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    latencies, size = [], 0
    for _ in range(SCRAPES):
        began = time.perf_counter()
        connection.request("GET", "/metrics")
        size = len(connection.getresponse().read())
        latencies.append(time.perf_counter() - began)
        # Within the rate that one peer may ask.
        time.sleep(0.025)
    connection.close()
    return latencies, size


if __name__ == "__main__":
    print(measure())
