"""Measures a fleet over 1,250 simulated agents with 10,000 ranks at a step per second.

Also measured: what a fleet costs an agent, and how soon the ranks of many nodes are armed.
"""

from __future__ import annotations

import contextlib
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx

from benchmarks import fleet_bus
from benchmarks.agent import JOB, RANKS, ranks_beside
from benchmarks.fleet_processes import (
    HANG_TIMEOUT_S,
    UP_TIMEOUT_S,
    choose_faults,
    delays,
    running_agents,
    start_fleet,
)
from benchmarks.processes import (
    LocalDaemon,
    at_least,
    at_most,
    core_percents,
    is_quick,
    rss_mib,
    running_daemon,
    start,
    stop,
    wait_until,
)
from benchmarks.simulated_agents import Scale, address, layout
from warpwatch_daemon.api_client import ApiClient, socket_path
from warpwatch_daemon.demo.processes import free_port

SCALE, QUICK_SCALE = Scale(1250, 256), Scale(100, 32)
# The straggler detector's learning phase at a step per second, and a margin.
LEARN_S = 300.0
WATCH_S = 60.0
FAULTS_S = 90.0
SLOW_JOBS, STUCK_JOBS = 20, 5
MAX_CORE_PERCENT = 100.0
MAX_RSS_MIB = 1536.0
MAX_STRAGGLER_P95_S = 30.0
MAX_HANG_S = 5.0

# A fleet is measured once it follows this share of its targets: a dead one must not stop the run.
MIN_FOLLOWED = 0.99
# Windows without and with a follower, in turns.
WINDOWS, WINDOW_S, QUICK_WINDOW_S = 4, 30.0, 5.0
MAX_STREAM_PERCENT = 0.5
AGENTS, RANKS_OF_AGENT = 8, 8
MAX_ARMED_S = 1.0
ARMED_STATES = ("armed", "recording", "exported", "written")
# All ranks of a node share one import.
_RANKS = f"""
import os, signal, time, torch
os.setsid()
signal.signal(signal.SIGTERM, lambda *_: os.killpg(0, signal.SIGKILL))
first = int(os.environ["FIRST"])
for number in range(first, first + {RANKS_OF_AGENT}):
    if os.fork() == 0:
        os.environ["RANK"] = str(number)
        import warpwatch
        monitor = warpwatch.attach(job="{JOB}")
        while True:
            with monitor.step():
                time.sleep(0.1)
signal.pause()
"""


def measure() -> dict[str, Any]:
    scale = QUICK_SCALE if is_quick() else SCALE
    there = layout(scale)
    faults = choose_faults(there, time.time() + LEARN_S, SLOW_JOBS, STUCK_JOBS)
    port = free_port()
    targets = [f"{address(number)}:{port}" for number in range(scale.nodes)]
    with (
        tempfile.TemporaryDirectory() as folder,
        running_agents(scale, faults, port),
        _running_fleet(Path(folder), targets) as (pid, api),
    ):
        time.sleep(max(0.0, faults.at - WATCH_S - time.time()))
        percents = core_percents({"fleet": pid}, lambda: time.sleep(WATCH_S))
        used_mib = rss_mib(pid)
        time.sleep(max(0.0, faults.at + FAULTS_S - time.time()))
        anomalies = api.get("/api/v1/anomalies")["anomalies"]
    slow = delays(anomalies, "straggler", faults)
    hung = [delay_s - HANG_TIMEOUT_S for delay_s in delays(anomalies, "hang", faults)]
    return {
        "agents": scale.nodes,
        "ranks": scale.nodes * scale.ranks,
        "jobs": len({node.job for node in there}),
        "simulated": "the agents; connections, fleet and detectors are real",
        "straggler_s": _quantiles(slow),
        "hang_after_its_deadline_s": _quantiles(hung),
        "stream": _stream(),
        "capture": _capture(),
        "bus": fleet_bus.measure(),
        "limits": [
            at_most("percent of a core", round(percents["fleet"], 1), MAX_CORE_PERCENT),
            at_most("RSS in MiB", used_mib, MAX_RSS_MIB),
            at_least("stragglers named", len(slow), len(faults.slow)),
            at_least("hangs found", len(hung), len(faults.stuck)),
            at_most("other anomalies", len(anomalies) - len(slow) - len(hung), 0),
            at_most("straggler p95 in s", _quantiles(slow)["p95"], MAX_STRAGGLER_P95_S),
            at_most("hang p95 in s", _quantiles(hung)["p95"], MAX_HANG_S),
        ],
    }


def _quantiles(values: list[float]) -> dict[str, float]:
    if len(values) < 2:
        return {"p50": sum(values), "p95": sum(values)}
    parts = statistics.quantiles(values, n=20, method="inclusive")
    return {"p50": round(parts[9], 1), "p95": round(parts[18], 1)}


@contextlib.contextmanager
def _running_fleet(folder: Path, targets: list[str], **own: Any) -> Iterator[tuple[int, ApiClient]]:
    """Run a fleet, with ``own`` keys in its section; yield its PID and API once it follows."""
    process, api = start_fleet(folder, {"targets": targets, **own})

    def is_following() -> bool:
        # With a dead target the fleet is not ready, and answers 503.
        sources = api.get("/readyz", accepted=503)["sources"]
        return len([one for one in sources if one["up"]]) >= MIN_FOLLOWED * len(targets)

    try:
        wait_until(is_following, UP_TIMEOUT_S)
        yield process.pid, api
    finally:
        stop(process)


def _stream() -> dict[str, Any]:
    """Measure what a follower costs an agent with eight ranks at 20 steps per second."""
    window_s = QUICK_WINDOW_S if is_quick() else WINDOW_S
    with running_daemon(sources={"nvml": {"enabled": False}}) as daemon, ranks_beside(daemon):
        percents: dict[bool, list[float]] = {False: [], True: []}
        for turn in range(2 * WINDOWS):
            followed = turn % 2 == 1
            with _follower(daemon) if followed else contextlib.nullcontext():
                time.sleep(2)
                used = core_percents({JOB: daemon.pid}, lambda: time.sleep(window_s))
            percents[followed].append(used[JOB])
    cost = (sum(percents[True]) - sum(percents[False])) / WINDOWS
    limit = at_most("percent of a core for the stream", round(cost, 2), MAX_STREAM_PERCENT)
    return {"ranks": RANKS, "windows_percent": percents, "limits": [limit]}


@contextlib.contextmanager
def _follower(daemon: LocalDaemon) -> Iterator[None]:
    """Read the compressed stream as a fleet does, and discard it."""
    transport = httpx.HTTPTransport(uds=str(socket_path(daemon.folder / "run")))
    over = threading.Event()

    def read() -> None:
        with (
            httpx.Client(transport=transport, timeout=30) as client,
            client.stream("GET", "http://localhost/api/v1/records?follow=true") as reply,
        ):
            for _ in reply.iter_raw():
                if over.is_set():
                    return

    thread = threading.Thread(target=read)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _capture() -> dict[str, Any]:
    """Measure how soon 64 real ranks on eight agents know the start step of a capture."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        token = folder / "agents"
        token.write_text("agents")
        daemons = [stack.enter_context(_agent(token, number)) for number in range(AGENTS)]
        for number, daemon in enumerate(daemons):
            own = {"FIRST": str(number * RANKS_OF_AGENT), "WARPWATCH_RUN": "1"}
            own["WORLD_SIZE"] = str(AGENTS * RANKS_OF_AGENT)
            stack.callback(stop, start(["-c", _RANKS], daemon.training_environment | own))
        agents = {"token_file": str(token), "allow_plain": True}
        targets = [f"127.0.0.1:{daemon.port}" for daemon in daemons]
        _, api = stack.enter_context(_running_fleet(folder, targets, agents=agents))
        armed_s = _armed_s(api)
    ranks = AGENTS * RANKS_OF_AGENT
    return {"ranks": ranks, "limits": [at_most("all armed in s", armed_s, MAX_ARMED_S)]}


def _agent(token: Path, number: int) -> contextlib.AbstractContextManager[LocalDaemon]:
    http = {"token_file": str(token)}
    return running_daemon(node=f"gpu-{number}", http=http, sources={"nvml": {"enabled": False}})


def _armed_s(api: ApiClient) -> float:
    """Return the seconds from the request until the fleet sees all ranks armed."""
    all_ranks = list(range(AGENTS * RANKS_OF_AGENT))

    def are_training() -> bool:
        ranks = api.get("/api/v1/ranks")["ranks"]
        return len(ranks) == len(all_ranks) and all(rank["steps_total"] > 20 for rank in ranks)

    wait_until(are_training, UP_TIMEOUT_S)
    begun = time.monotonic()
    body = {"job": JOB, "kind": "torch", "steps": 1, "ranks": all_ranks}
    capture = api.post("/api/v1/captures", body)["id"]

    def are_armed() -> bool:
        ranks = api.get(f"/api/v1/captures/{capture}")["ranks"]
        return all(rank["state"] in ARMED_STATES for rank in ranks)

    while not are_armed():
        time.sleep(0.01)
        if time.monotonic() - begun > UP_TIMEOUT_S:
            raise TimeoutError("not all ranks are armed")
    return round(time.monotonic() - begun, 2)
