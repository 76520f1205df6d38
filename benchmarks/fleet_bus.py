"""Measures fleet processes that share jobs on a real nats-server: 1, 2 and 4 of them.

Also measured: how soon the others replace a killed one, how soon a new one has its share, and what
four find in 100,000 ranks with a step per 10 s.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from benchmarks.fleet_processes import (
    UP_TIMEOUT_S,
    Faults,
    choose_faults,
    delays,
    fleet_config,
    running_agents,
    start_fleet,
)
from benchmarks.processes import (
    CannotMeasure,
    at_least,
    at_most,
    clean_environment,
    core_percents,
    is_quick,
    rss_mib,
    stop,
    wait_until,
)
from benchmarks.simulated_agents import Scale, layout
from warpwatch_daemon.api_client import ApiClient
from warpwatch_daemon.demo.processes import free_port

# 10,000 records per second; the largest of 1,101 jobs has 1 % of the ranks.
SHARED, QUICK_SHARED = Scale(2500, 25, (2, 2, 2, 3), ranks=4), Scale(250, 3, (2, 2, 2, 3), ranks=4)
LARGE, QUICK_LARGE = Scale(6250, 64, (2, 4, 8, 16, 32), 16, 10), Scale(250, 20, step_s=10)
COUNTS, TURNS = (1, 2, 4), 3
HEALTHY = Faults(float("inf"), {}, [])
PARTITIONS = 64
# In this time the loads are measured, and the partitions shared by them.
SETTLE_S, WATCH_S = 60.0, 60.0
MAX_EXCESS = 1.15
# A scrape of all workers renders the series of 10,000 ranks: more would keep them busy.
POLL_S = 2.0
MAX_TAKEOVER_S, MAX_JOIN_S = 20.0, 30.0
SLOW_JOBS, STUCK_JOBS = 40, 10
# A step takes 10 s, and a hang is certain after 28 of them.
HEALTHY_S, FAULTS_S = 150.0, 330.0


class Workers:
    """Fleet processes on the nats-server at ``port``, with their files in ``folder``."""

    def __init__(self, folder: Path, port: int, monitor: int) -> None:
        self.port, self.monitor = port, monitor
        self.bus = {"url": f"nats://127.0.0.1:{port}"}
        self._folder = folder
        self.running: list[tuple[subprocess.Popen[bytes], ApiClient]] = []
        config = fleet_config(folder, port, {}, bus=self.bus)
        create = ["-m", "warpwatch_daemon", "fleet", "--config", str(config), "--create-streams"]
        subprocess.run([sys.executable, *create], env=clean_environment(), check=True)

    def start(self) -> None:
        self.running.append(start_fleet(self._folder, {}, bus=self.bus))

    def stop(self) -> None:
        for process, _ in self.running:
            stop(process)

    def sums(self, series: str) -> list[float]:
        """Return the sum of a series on each worker."""
        value = re.compile(rf"^warpwatch_fleet_{series}\{{.*\}} (\S+)$", re.MULTILINE)
        texts = [urlopen(f"{api.url}/metrics").read().decode() for _, api in self.running]
        return [sum(map(float, value.findall(text))) for text in texts]

    def _messages(self) -> int:
        found = json.load(urlopen(f"http://127.0.0.1:{self.monitor}/varz"))["in_msgs"]
        return int(found)

    def have_all(self) -> bool:
        return sum(self.sums("partition_judged")) == PARTITIONS

    def share_all(self) -> bool:
        """Return whether none has much more than its share of the ranks."""
        ranks = self.sums("job_ranks")
        return self.have_all() and max(ranks) <= MAX_EXCESS * sum(ranks) / len(ranks)

    def use(self) -> dict[str, float]:
        """Return what the busiest worker and all together use, and the messages to the server."""
        pids = {str(process.pid): process.pid for process, _ in self.running}
        before = self._messages()
        percents = core_percents(pids, lambda: time.sleep(WATCH_S)).values()
        messages_per_s = (self._messages() - before) / WATCH_S
        memory = [rss_mib(pid) for pid in pids.values()]
        return {
            "messages_per_s": round(messages_per_s),
            "core_percent": round(max(percents), 2), "all_core_percent": round(sum(percents), 2),
            "rss_mib": max(memory), "all_rss_mib": round(sum(memory), 1),
            "mean_lag_s": round(sum(self.sums("agent_lag_seconds")) / sum(self.sums("agents")), 1),
        }  # fmt: skip


def measure() -> dict[str, Any]:
    scale = QUICK_SHARED if is_quick() else SHARED
    with _workers(1) as workers:
        time.sleep(10)
        idle_mib = rss_mib(workers.running[0][0].pid)
    # By turns: the same work takes up to a fifth more of the processor in another minute.
    turns = [{count: _shared(scale, count) for count in COUNTS} for _ in range(TURNS)]
    shared = {count: _medians([turn[count] for turn in turns]) for count in COUNTS}
    takeover_s, joining_s = _replaced(scale)
    limits = [
        at_most("s until a killed worker is replaced", takeover_s, MAX_TAKEOVER_S),
        at_most("s until a new worker has its share", joining_s, MAX_JOIN_S),
    ]
    for count in COUNTS[1:]:
        # On a busy machine the agents send less, so the time per message is compared.
        cost = {one: used["core_percent"] / used["messages_per_s"] for one, used in shared.items()}
        cpu = cost[count] / cost[1]
        memory = (shared[count]["rss_mib"] - idle_mib) / (shared[1]["rss_mib"] - idle_mib)
        for what, share in ("processor time", cpu), ("memory above idle", memory):
            name = f"{what} of the busiest of {count}, of one worker's"
            limits.append(at_most(name, round(share, 3), round(MAX_EXCESS / count, 3)))
    return {
        "records_per_s": scale.nodes * scale.ranks // scale.step_s,
        "jobs": len({node.job for node in layout(scale)}),
        "simulated": "the agents; nats-server, workers and detectors are real",
        "idle_mib": idle_mib,
        "workers": shared,
        "limits": limits,
        "large": measure_large(),
    }


def _shared(scale: Scale, count: int) -> dict[str, float]:
    """Measure so many workers."""
    with _workers(count) as workers, running_agents(scale, HEALTHY, workers.port, on_bus=True):
        time.sleep(SETTLE_S)
        used = workers.use()
        print(f"{count} workers: {used}", file=sys.stderr, flush=True)
        return used


def _medians(turns: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(turn[name] for turn in turns) for name in turns[0]}


def _replaced(scale: Scale) -> tuple[float, float]:
    """Return how soon the others replace a killed worker, and how soon a new one has its share."""
    with _workers(COUNTS[-1]) as workers, running_agents(scale, HEALTHY, workers.port, on_bus=True):
        time.sleep(SETTLE_S)
        process, _ = workers.running.pop()
        process.kill()
        takeover_s = _seconds_until(workers.have_all)
        process.wait()
        time.sleep(SETTLE_S)
        workers.start()
        return takeover_s, _seconds_until(workers.share_all)


def _seconds_until(done: Callable[[], bool]) -> float:
    """Return the seconds until it is done, or until it was given up."""
    begun = time.monotonic()
    with contextlib.suppress(TimeoutError):
        wait_until(done, UP_TIMEOUT_S, POLL_S)
    return round(time.monotonic() - begun, 1)


def measure_large() -> dict[str, Any]:
    """Measure four workers with many ranks, and what they find in them."""
    scale = QUICK_LARGE if is_quick() else LARGE
    faults = choose_faults(layout(scale), time.time() + HEALTHY_S, SLOW_JOBS, STUCK_JOBS)
    with _workers(COUNTS[-1]) as workers, running_agents(scale, faults, workers.port, on_bus=True):
        time.sleep(max(0.0, faults.at - WATCH_S - time.time()))
        used = workers.use()
        print(f"many ranks: {used}", file=sys.stderr, flush=True)
        time.sleep(max(0.0, faults.at + FAULTS_S - time.time()))
        anomalies = workers.running[0][1].get("/api/v1/anomalies")["anomalies"]
    slow, hung = delays(anomalies, "straggler", faults), delays(anomalies, "hang", faults)
    ranks = scale.nodes * scale.ranks
    return {
        "ranks": ranks,
        "jobs": len({node.job for node in layout(scale)}),
        "used": used,
        "core_percent_per_10_000_ranks": round(used["all_core_percent"] * 10000 / ranks, 2),
        "rss_mib_per_10_000_ranks": round(used["all_rss_mib"] * 10000 / ranks, 1),
        "limits": [
            at_least("stragglers named", len(slow), len(faults.slow)),
            at_least("hangs found", len(hung), len(faults.stuck)),
            at_most("other anomalies", len(anomalies) - len(slow) - len(hung), 0),
        ],
    }


@contextlib.contextmanager
def _workers(count: int) -> Iterator[Workers]:
    """Run a nats-server and workers; yield them once they have all partitions."""
    nats = shutil.which("nats-server", path="/usr/sbin:/usr/bin:/usr/local/bin")
    if nats is None:
        raise CannotMeasure("no nats-server; install the package nats-server")
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        port, monitor = free_port(), free_port()
        ports = ["-a", "127.0.0.1", "-p", str(port), "-m", str(monitor)]
        files = ["-js", "-sd", folder, "-l", f"{folder}/log"]
        stack.callback(stop, subprocess.Popen([nats, *ports, *files]))
        workers = Workers(Path(folder), port, monitor)
        stack.callback(workers.stop)
        for _ in range(count):
            workers.start()
        wait_until(workers.have_all, UP_TIMEOUT_S, POLL_S)
        yield workers
