"""Workers that are killed at random moments while anomalies begin and end: each is one."""

import asyncio
import json
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.fleet.bus.server import Fabric, NatsServer
from tests.fleet.nodes import TestNode, seen, step
from tests.loop.node import ROOT
from tests.waiting import DEADLINE_S
from warpwatch_daemon.demo.processes import free_port

pytestmark = pytest.mark.bus

KILLS = 20
STEP_S = 0.1
# Long enough to be found, and to be over, on a busy machine.
FAULT_STEPS, HEALTHY_STEPS = 150, 200
LEARNT_STEPS = 150
# Between kills: longer than a lease lasts, so that each worker gets partitions again.
LEAST_S, MOST_S = 8.0, 18.0


class Told(ThreadingHTTPServer):
    """A webhook's receiver; ``events`` are all that were received, again and again or not."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        events = self.events

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                size = int(self.headers["Content-Length"])
                events.append(json.loads(self.rfile.read(size)))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                """Say nothing."""

        super().__init__(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()


class Worker:
    def __init__(self, folder: Path, bus: str, hook: int) -> None:
        folder.mkdir()
        self.port = free_port()
        self._folder = folder
        self._file = folder / "fleet.yaml"
        url = f"http://127.0.0.1:{hook}/"
        tree = {
            "bus": {"url": bus},
            "exporters": {"webhooks": [{"url": url}]},
            "anomalies": {"reopen_s": 1.0},
            "fleet": {"listen": f"127.0.0.1:{self.port}", "state_dir": str(folder / "state")},
        }
        self._file.write_text(yaml.safe_dump(tree))
        self.start()

    def start(self) -> None:
        with (self._folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "warpwatch_daemon", "fleet", "--config", str(self._file)],
                cwd=ROOT,
                stdout=log,
                stderr=log,
                env={"WARPWATCH_DIR": str(self._folder / "run"), "PATH": "/usr/bin:/bin"},
            )

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def told() -> Iterator[Told]:
    told = Told()
    yield told
    told.shutdown()
    told.server_close()


class Job:
    """A job on two nodes; ``slow`` is the rank that is slower now, None for none."""

    def __init__(self) -> None:
        self.nodes = [TestNode("gpu-1"), TestNode("gpu-2")]
        self.slow: int | None = None
        self.number = 0
        begun = time.time()
        for rank in range(4):
            self.nodes[rank // 2].say(seen(rank, time=begun))

    def step(self) -> None:
        self.number += 1
        for rank in range(4):
            is_slow = self.slow is not None
            waits_s = 0.15 if is_slow and rank != self.slow else 0.0
            about: dict[str, Any] = {"phases_s": {"comm": 0.01 + waits_s}}
            took_s = STEP_S + 0.15 * is_slow
            self.nodes[rank // 2].say(step(rank, self.number, time.time(), took_s, **about))


async def live(job: Job, server: NatsServer, ended: asyncio.Event) -> int:
    """Faults come and go until ``ended``; return how many there were."""
    fabric = Fabric(server)
    agents = [await fabric.agent(node, time.time) for node in job.nodes]

    async def publish() -> None:
        while True:
            for agent in agents:
                await agent.advance()
            await asyncio.sleep(0.5)

    publishing = asyncio.create_task(publish())
    faults = 0

    async def steps(count: int) -> None:
        for _ in range(count):
            job.step()
            await asyncio.sleep(STEP_S + 0.15 * (job.slow is not None))

    await steps(LEARNT_STEPS)
    while not ended.is_set():
        job.slow = faults % 4
        faults += 1
        await steps(FAULT_STEPS)
        job.slow = None
        await steps(HEALTHY_STEPS)
    await steps(HEALTHY_STEPS)
    publishing.cancel()
    await fabric.close()
    return faults


def test_twenty_kills_at_random_moments_repeat_and_lose_nothing(tmp_path, told):
    folder = tmp_path / "nats"
    folder.mkdir()
    server = NatsServer(folder)
    workers: list[Worker] = []
    chance = random.Random(7)
    print(f"the moments are of seed 7, {KILLS} kills")

    async def whole() -> int:
        await Fabric(server).create()
        workers.extend(
            Worker(tmp_path / f"w{number}", server.url, told.server_port) for number in (1, 2)
        )
        ended = asyncio.Event()
        living = asyncio.create_task(live(Job(), server, ended))
        for number in range(KILLS):
            await asyncio.sleep(chance.uniform(LEAST_S, MOST_S))
            worker = workers[number % 2]
            worker.kill()
            await asyncio.sleep(chance.uniform(0.0, 3.0))
            worker.start()
        ended.set()
        faults = await asyncio.wait_for(living, DEADLINE_S)
        await asyncio.sleep(40.0)
        return faults

    try:
        faults = asyncio.run(whole())
        opened = {e["anomaly"] for e in told.events if e["event"] == "anomaly_opened"}
        closed = {e["anomaly"] for e in told.events if e["event"] == "anomaly_closed"}
        repeated = Counter((e["event"], e["anomaly"]) for e in told.events)
        print(f"{faults} faults, {len(repeated)} events in {len(told.events)} messages")
        kinds = {e["kind"] for e in told.events}
        assert kinds == {"straggler"}, kinds
        assert len(opened) == faults
        assert closed == opened
    finally:
        for worker in workers:
            worker.kill()
        server.kill()
