"""A fleet over 1,250 simulated agents with 10,000 ranks at a step a second: cost and delays."""

from __future__ import annotations

import contextlib
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import fleet_parts
from benchmarks.fleet_parts import running_fleet
from benchmarks.limits import at_least, at_most
from benchmarks.processes import (
    clean_environment,
    core_percents,
    is_quick,
    memory,
    stop,
)
from benchmarks.simulated_agents import RANKS_A_NODE, Node, address, layout
from warpwatch_daemon.demo.processes import free_port

NODES, LARGEST = 1250, 256
QUICK_NODES, QUICK_LARGEST = 100, 32
# What a straggler's detector learns of a rank at a step a second, and some.
LEARN_S = 300.0
WATCH_S = 60.0
FAULTS_S = 90.0
SLOW_JOBS, STUCK_JOBS = 20, 5
HANG_TIMEOUT_S = 30.0
HANG = {"timeout_s": HANG_TIMEOUT_S}
# Of the comparison of shards; its jobs are small, so that two have half of them each.
SHARDED_NODES, SHARDED_LARGEST = 400, 8
OPEN_FILES = 8192
MAX_CORE_PERCENT = 100.0
MAX_RSS_MIB = 1536.0
MAX_STRAGGLER_P95_S = 30.0
MAX_HANG_S = 5.0


@dataclass(frozen=True, slots=True)
class Faults:
    """slow: by job, which rank; stuck: jobs; both begin at ``at`` (wall clock)."""

    at: float
    slow: dict[str, int]
    stuck: list[str]

    @property
    def settings(self) -> dict[str, Any]:
        return {"slow": self.slow, "stuck": self.stuck, "slow_at": self.at, "stuck_at": self.at}


def measure() -> dict[str, Any]:
    nodes, largest = (QUICK_NODES, QUICK_LARGEST) if is_quick() else (NODES, LARGEST)
    there = layout(nodes, largest)
    faults = _faults(there, time.time() + LEARN_S)
    with (
        tempfile.TemporaryDirectory() as folder,
        _agents(nodes, largest, faults) as port,
        running_fleet(Path(folder), _targets(nodes, port), hang=HANG) as (pid, api),
    ):
        time.sleep(max(0.0, faults.at - WATCH_S - time.time()))
        percents = core_percents({"fleet": pid}, lambda: time.sleep(WATCH_S))
        rss_mib = memory(pid).rss_mib
        time.sleep(max(0.0, faults.at + FAULTS_S - time.time()))
        anomalies = api.get("/api/v1/anomalies")["anomalies"]
    slow = _delays(anomalies, "straggler", faults)
    hung = [delay_s - HANG_TIMEOUT_S for delay_s in _delays(anomalies, "hang", faults)]
    return {
        "agents": nodes,
        "ranks": nodes * RANKS_A_NODE,
        "jobs": len({node.job for node in there}),
        "simulated": "the agents; connections, fleet and detectors are real",
        "straggler_s": _quantiles(slow),
        "hang_after_its_deadline_s": _quantiles(hung),
        "stream": fleet_parts.stream(),
        "capture": fleet_parts.capture(),
        "shards": fleet_parts.shards(_healthy),
        "limits": [
            at_most("percent of a core", round(percents["fleet"], 1), MAX_CORE_PERCENT),
            at_most("RSS in MiB", rss_mib, MAX_RSS_MIB),
            at_least("stragglers named", len(slow), len(faults.slow)),
            at_least("hangs found", len(hung), len(faults.stuck)),
            at_most("other anomalies", len(anomalies) - len(slow) - len(hung), 0),
            at_most("straggler p95 in s", _quantiles(slow)["p95"], MAX_STRAGGLER_P95_S),
            at_most("hang p95 in s", _quantiles(hung)["p95"], MAX_HANG_S),
        ],
    }


def _targets(nodes: int, port: int) -> list[str]:
    return [f"{address(number)}:{port}" for number in range(nodes)]


@contextlib.contextmanager
def _healthy() -> Iterator[list[str]]:
    with _agents(SHARDED_NODES, SHARDED_LARGEST, Faults(0.0, {}, [])) as port:
        yield _targets(SHARDED_NODES, port)


def _faults(nodes: list[Node], at: float) -> Faults:
    """Among the jobs over several nodes."""
    sizes = {node.job: node.world_size for node in nodes}
    jobs = [job for job, world_size in sizes.items() if world_size > RANKS_A_NODE]
    stuck = jobs[-min(STUCK_JOBS, len(jobs) // 2) :]
    slow = [job for job in jobs if job not in stuck][:SLOW_JOBS]
    return Faults(at, {job: sizes[job] // 2 for job in slow}, stuck)


def _delays(anomalies: list[dict[str, Any]], kind: str, faults: Faults) -> list[float]:
    """From the fault's beginning, of those that name the right job and rank."""
    wanted: dict[str, int | None] = dict(faults.slow)
    if kind == "hang":
        wanted = dict.fromkeys(faults.stuck)
    return [
        one["time"] - faults.at
        for one in anomalies
        if one["kind"] == kind
        and one["job"] in wanted
        and wanted[one["job"]] in (None, one["rank"])
    ]


def _quantiles(values: list[float]) -> dict[str, float]:
    if len(values) < 2:
        return {"p50": sum(values), "p95": sum(values)}
    parts = statistics.quantiles(values, n=20, method="inclusive")
    return {"p50": round(parts[9], 1), "p95": round(parts[18], 1)}


@contextlib.contextmanager
def _agents(nodes: int, largest: int, faults: Faults) -> Iterator[int]:
    """The port that they all listen on."""
    port = free_port()
    settings = {"nodes": nodes, "largest": largest, **faults.settings}
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.simulated_agents", str(port), json.dumps(settings)],
        env=clean_environment(),
        stdout=subprocess.PIPE,
        preexec_fn=_allow_open_files,
    )
    assert process.stdout is not None
    try:
        process.stdout.readline()
        yield port
    finally:
        stop(process)
        process.stdout.close()


def _allow_open_files() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(OPEN_FILES, hard), hard))
