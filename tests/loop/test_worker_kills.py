"""Workers that are killed while anomalies begin and end: each is one, wherever it is reported."""

import asyncio
import contextlib
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.dashboards.monitoring.web import Web
from tests.fleet.bus.server import Fabric, NatsServer
from tests.fleet.nodes import TestNode, seen, step
from tests.loop.cluster import LoopCluster, loop_cluster
from tests.loop.node import poll
from warpwatch_daemon.for_fleet.bus import RecordPublisher
from warpwatch_runtime.bus import BusError
from warpwatch_telemetry.bus_messages import Publisher

pytestmark = pytest.mark.bus

KILLS, WORKERS, JOBS = 20, 3, 12
# The ranks of a job stand still for the last seconds of each round; the jobs do so in turns.
ROUND_S, STANDSTILL_S, HANG_S = 60.0, 30.0, 5.0
STEP_S = 0.5


class Agents:
    """Two nodes, each with a rank of each job, in a thread until ``stop``.

    ``hangs``: by job, the times at which its ranks stood still. They work on after ``calm``.
    """

    def __init__(self, server: NatsServer) -> None:
        self.hangs = Counter({f"job-{number}": 0 for number in range(JOBS)})
        self.calm = threading.Event()
        self._stop = threading.Event()
        self._server = server
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    async def _run(self) -> None:
        fabric = Fabric(self._server)
        nodes = [TestNode("gpu-1"), TestNode("gpu-2")]
        agents = [await fabric.agent(node, time.time) for node in nodes]
        for node, agent in zip(nodes, agents, strict=True):
            await agent.bus.answer(Publisher(node.name).requests, _accept)
        publishing = [asyncio.create_task(_publish(agent)) for agent in agents]
        await self._train(nodes)
        for task in publishing:
            task.cancel()
        await asyncio.gather(*publishing, return_exceptions=True)
        await fabric.close()

    async def _train(self, nodes: list[TestNode]) -> None:
        begun, number = time.time(), 0
        for job in self.hangs:
            for rank, node in enumerate(nodes):
                node.say(seen(rank, 2, job, time=begun))
        stands = dict.fromkeys(self.hangs, False)
        while not self._stop.is_set():
            number += 1
            await asyncio.sleep(max(0.0, begun + number * STEP_S - time.time()))
            for place, job in enumerate(self.hangs):
                into_s = (number * STEP_S + place * ROUND_S / JOBS) % ROUND_S
                standing_s = into_s - (ROUND_S - STANDSTILL_S)
                # A standstill that has begun is as long as all others.
                starts = standing_s == 0 and number * STEP_S > ROUND_S and not self.calm.is_set()
                now_stands = standing_s >= 0 and (stands[job] or starts)
                self.hangs[job] += now_stands and not stands[job]
                stands[job] = now_stands
                for rank, node in enumerate(nodes) if not now_stands else ():
                    own = step(rank, number, begun + number * STEP_S, STEP_S)
                    node.say(msgspec.structs.replace(own, job=job))


async def _publish(agent: RecordPublisher) -> None:
    while True:
        with contextlib.suppress(BusError):
            await agent.advance()
        await asyncio.sleep(1.0)


async def _accept(operation: str, body: bytes) -> bytes:
    return b"200{}"


@pytest.fixture
def site(tmp_path: Path) -> Iterator[tuple[LoopCluster, Agents, Web]]:
    folder = tmp_path / "nats"
    folder.mkdir()
    server, inbox = NatsServer(folder), Web({})
    asyncio.run(Fabric(server).create())
    config: dict[str, Any] = {
        "bus": {"url": server.url},
        "detection": {"hang": {"timeout_s": HANG_S, "warmup_timeout_s": HANG_S}},
        "anomalies": {"hold_s": 0, "reopen_s": 0},
        "triggers": {"recipes": {"hang": None}},
        "exporters": {"webhooks": [{"url": f"http://127.0.0.1:{inbox.port}/"}]},
    }
    with inbox.serving(), loop_cluster(tmp_path, 0, **config) as cluster:
        agents = Agents(server)
        try:
            yield cluster, agents, inbox
        finally:
            agents.stop()
            server.kill()


def test_twenty_kills_of_workers_leave_each_anomaly_one(site):
    cluster, agents, inbox = site
    cluster.start_fleet()
    workers = [cluster.start_worker(number) for number in range(1, WORKERS)]
    chance = random.Random(7)
    for number in range(KILLS):
        agents.calm.wait(chance.uniform(10.0, 25.0))
        place = chance.randrange(WORKERS)
        if place == 0:
            cluster.kill_fleet()
            cluster.start_fleet()
        else:
            workers[place - 1].kill()
            workers[place - 1] = cluster.start_worker(WORKERS + number)
    agents.calm.set()

    def found() -> list[Any]:
        return sorted(cluster.get("anomalies"), key=lambda one: (one["job"], one["time"]))

    def hangs() -> Counter[str]:
        return Counter(one["job"] for one in found() if one["kind"] == "hang" and one["end_time"])

    def difference() -> str:
        keys = ("job", "kind", "id", "time", "end_time")
        return "\n".join(str([one[key] for key in keys]) for one in found()) + f"{expected}"

    expected = agents.hangs
    poll(lambda: hangs() == expected, difference)
    ids = {one["id"] for one in found()}
    assert len(ids) == len(found()) == sum(expected.values()) > JOBS

    def told(event: str) -> set[str]:
        return {one["anomaly"] for one in inbox.posted["/"] if one["event"] == event}

    # The last message may still be on its way.
    poll(lambda: told("anomaly_closed") == ids, lambda: f"{ids ^ told('anomaly_closed')}")
    assert told("anomaly_opened") == ids
