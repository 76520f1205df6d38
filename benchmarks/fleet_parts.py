"""What a fleet costs an agent, how soon ranks of many nodes are armed, and what a shard saves."""

from __future__ import annotations

import contextlib
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import yaml

from benchmarks.agent import JOB, RANKS, ranks_beside
from benchmarks.limits import at_most
from benchmarks.node import LocalDaemon, running_daemon
from benchmarks.processes import (
    clean_environment,
    core_percents,
    is_quick,
    start,
    stop,
    wait_until,
)
from warpwatch_daemon.api_client import ApiClient, socket_path
from warpwatch_daemon.demo.processes import free_port

UP_TIMEOUT_S = 120.0
# In turn without and with somebody who follows.
WINDOWS, WINDOW_S, QUICK_WINDOW_S = 4, 30.0, 5.0
MAX_STREAM_PERCENT = 0.5
AGENTS, RANKS_OF_AGENT = 8, 8
MAX_ARMED_S = 1.0
SHARDED_WINDOW_S = 30.0
# Judging is halved; every shard follows all agents and hears of their time.
MAX_SHARD = 0.75
# One import of torch for all ranks of a node.
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


@contextlib.contextmanager
def running_fleet(folder: Path, targets: list[str], **own: Any) -> Iterator[tuple[int, ApiClient]]:
    """Its process and API, once it follows all agents. own: more of the section `fleet`."""
    port, token, config = free_port(), folder / "token", folder / "fleet.yaml"
    token.write_text("bench")
    hang = own.pop("hang", {})
    section: dict[str, Any] = {"listen": f"127.0.0.1:{port}", "targets": targets}
    section |= {"token_file": str(token), "state_dir": str(folder / f"state-{port}"), **own}
    config.write_text(yaml.safe_dump({"fleet": section, "detection": {"hang": hang}}))
    command = ["-m", "warpwatch_daemon", "fleet", "--config", str(config)]
    process = start(command, clean_environment(), folder / "log")
    api = ApiClient(f"http://127.0.0.1:{port}", token)

    def is_following() -> bool:
        sources = api.get("/readyz")["sources"]
        return len(sources) == len(targets) and all(one["up"] for one in sources)

    try:
        wait_until(is_following, UP_TIMEOUT_S)
        yield process.pid, api
    finally:
        stop(process)


def stream() -> dict[str, Any]:
    """Of an agent with eight ranks at 20 steps a second: what it costs that one follows it."""
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
    """Reads as a fleet does, packed, and throws it away."""
    transport = httpx.HTTPTransport(uds=str(socket_path(daemon.folder / "run")))
    over = threading.Event()

    def read() -> None:
        with (
            httpx.Client(transport=transport, timeout=30) as client,
            client.stream("GET", "http://localhost/api/v1/records?follow=true") as answer,
        ):
            for _ in answer.iter_raw():
                if over.is_set():
                    return

    thread = threading.Thread(target=read)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def capture() -> dict[str, Any]:
    """64 ranks over eight agents, real processes with the shim: until all know the start step."""
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
        _, api = stack.enter_context(running_fleet(folder, targets, agents=agents))
        armed_s = _armed_s(api)
    ranks = AGENTS * RANKS_OF_AGENT
    return {"ranks": ranks, "limits": [at_most("all armed in s", armed_s, MAX_ARMED_S)]}


def _agent(token: Path, number: int) -> contextlib.AbstractContextManager[LocalDaemon]:
    http = {"token_file": str(token)}
    return running_daemon(node=f"gpu-{number}", http=http, sources={"nvml": {"enabled": False}})


def _armed_s(api: ApiClient) -> float:
    """From the request on, in seconds, as the fleet sees it."""
    all_ranks = list(range(AGENTS * RANKS_OF_AGENT))

    def are_training() -> bool:
        ranks = api.get("/api/v1/ranks")["ranks"]
        return len(ranks) == len(all_ranks) and all(rank["steps_total"] > 20 for rank in ranks)

    wait_until(are_training, UP_TIMEOUT_S)
    begun = time.monotonic()
    body = {"job": JOB, "kind": "torch", "steps": 1, "ranks": all_ranks}
    asked = api.post("/api/v1/captures", body)["id"]

    def are_armed() -> bool:
        said = api.get(f"/api/v1/captures/{asked}")
        return {rank["state"] for rank in said["ranks"]} <= {
            "armed",
            "recording",
            "exported",
            "written",
        }

    while not are_armed():
        time.sleep(0.01)
        if time.monotonic() - begun > UP_TIMEOUT_S:
            raise TimeoutError("not all ranks are armed")
    return round(time.monotonic() - begun, 2)


def shards(agents: Callable[[], contextlib.AbstractContextManager[list[str]]]) -> dict[str, Any]:
    """Of one fleet over these agents, and of each of two that share them."""
    percents = []
    with tempfile.TemporaryDirectory() as folder, agents() as targets:
        for shard in ({}, {"index": 0, "of": 2}, {"index": 1, "of": 2}):
            with running_fleet(Path(folder), targets, shard=shard) as (pid, _):
                time.sleep(5)
                used = core_percents({JOB: pid}, lambda: time.sleep(SHARDED_WINDOW_S))
            percents.append(round(used[JOB], 1))
    whole, *parts = percents
    limit = at_most("of the work, for the larger of two", round(max(parts) / whole, 2), MAX_SHARD)
    return {"agents": len(targets), "percent": whole, "percent_of_each": parts, "limits": [limit]}
