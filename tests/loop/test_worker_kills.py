"""Workers that are killed while anomalies begin and end: each is one, wherever it is reported."""

import asyncio
import contextlib
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.dashboards.monitoring.alertmanager import alertmanager
from tests.dashboards.monitoring.prometheus import every_second, prometheus
from tests.dashboards.monitoring.web import Web
from tests.fleet.bus.server import Fabric, NatsServer
from tests.fleet.nodes import TestNode, seen, step
from tests.loop.cluster import LoopCluster, loop_cluster
from tests.loop.node import poll
from warpwatch_daemon.demo.processes import free_port
from warpwatch_daemon.for_fleet.bus import RecordPublisher
from warpwatch_dashboards import rule_files
from warpwatch_runtime.bus import BusError
from warpwatch_telemetry.bus_messages import Publisher, name_of
from warpwatch_telemetry.captures import Capture, CaptureRequest, RankCapture

pytestmark = pytest.mark.bus

KILLS, WORKERS, JOBS = 20, 3, 12
# The ranks of a job stand still for the last seconds of each round; the jobs do so in turns.
ROUND_S, STANDSTILL_S, HANG_S = 96.0, 60.0, 5.0
STEP_S = 0.5


class PlayedNode(TestNode):
    """A node that accepts each capture once, and reports at once that it failed."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.captures: dict[str, Capture] = {}

    async def reply(self, operation: str, body: bytes) -> bytes:
        if name_of(operation.partition(".")[2]) != "captures":
            return b"200{}"
        about = json.loads(body)
        if about["id"] in self.captures:
            return b'409{"error":{"reason":"refused_busy","detail":"it exists"}}'
        names = ("job", "owner", "run", "kind", "anomaly_id", "anomaly_kind")
        request = CaptureRequest(trigger="anomaly", **{name: about[name] for name in names})
        ranks, now = tuple(RankCapture(one, "failed") for one in about["ranks"]), time.time()
        self.captures[about["id"]] = Capture(
            about["id"], request, now, ranks, 2, outcome="failed", end_time=now, of_fleet=True
        )
        self.stream.put_captures(list(self.captures.values()))
        return b"202{}"


class Agents:
    """Two nodes, each with a rank of each job, in a thread until ``stop``.

    ``hangs``: by job, the times at which its ranks stood still. They work on after ``calm``.
    """

    def __init__(self, server: NatsServer) -> None:
        self.hangs = Counter({f"job-{number}": 0 for number in range(JOBS)})
        self.nodes = [PlayedNode("gpu-1"), PlayedNode("gpu-2")]
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
        agents = [await fabric.agent(node, time.time, time.monotonic) for node in self.nodes]
        for node, agent in zip(self.nodes, agents, strict=True):
            await agent.bus.serve(Publisher(node.name).requests, node.reply)
        publishing = [asyncio.create_task(_publish(agent)) for agent in agents]
        await self._train()
        for task in publishing:
            task.cancel()
        await asyncio.gather(*publishing, return_exceptions=True)
        await fabric.close()

    async def _train(self) -> None:
        begun, number = time.time(), 0
        for job in self.hangs:
            for rank, node in enumerate(self.nodes):
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
                for rank, node in enumerate(self.nodes) if not now_stands else ():
                    own = step(rank, number, begun + number * STEP_S, STEP_S)
                    node.say(msgspec.structs.replace(own, job=job))


async def _publish(agent: RecordPublisher) -> None:
    while True:
        with contextlib.suppress(BusError):
            await agent.advance()
        await asyncio.sleep(1.0)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[tuple[LoopCluster, Agents, Web, list[int]]]:
    folder = tmp_path / "nats"
    folder.mkdir()
    server, inbox = NatsServer(folder), Web({})
    asyncio.run(Fabric(server).create())
    config: dict[str, Any] = {
        "bus": {"url": server.url},
        "detection": {"hang": {"timeout_s": HANG_S, "warmup_timeout_s": HANG_S}},
        "anomalies": {"hold_s": 0, "reopen_s": 0},
        "exporters": {"webhooks": [{"url": f"http://127.0.0.1:{inbox.port}/"}]},
    }
    alerts, token = f"http://127.0.0.1:{inbox.port}/alerts", tmp_path / "token"
    rules = [every_second(rule_files.FOLDER / "anomalies.yaml", tmp_path, "2s")]
    with (
        inbox.serving(),
        loop_cluster(tmp_path, 0, **config) as cluster,
        alertmanager(tmp_path, alerts, token, "WarpwatchHang", repeat="1h") as manager,
    ):
        ports = [cluster.port, *(free_port() for _ in range(1, WORKERS))]
        targets: dict[int, dict[str, str]] = {port: {} for port in ports}
        agents = Agents(server)
        try:
            with prometheus(
                tmp_path, targets, rules=rules, alertmanager=manager.port, interval="2s"
            ):
                yield cluster, agents, inbox, ports
        finally:
            agents.stop()
            server.kill()


def test_twenty_kills_of_workers_leave_each_anomaly_one(site):
    cluster, agents, inbox, ports = site
    cluster.start_fleet()
    workers = [cluster.start_worker(place, ports[place]) for place in range(1, WORKERS)]
    chance = random.Random(7)
    for _ in range(KILLS):
        agents.calm.wait(chance.uniform(10.0, 25.0))
        place = chance.randrange(WORKERS)
        if place == 0:
            cluster.kill_fleet()
            cluster.start_fleet()
        else:
            workers[place - 1].kill()
            workers[place - 1].wait()
            workers[place - 1] = cluster.start_worker(place, ports[place])
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
    captured = Counter(
        (node.name, one.request.anomaly_id)
        for node in agents.nodes
        for one in node.captures.values()
    )
    assert set(captured.values()) == {1}, captured
    assert JOBS < len({ident for _, ident in captured} & ids) == len(captured) / len(agents.nodes)

    def notified(status: str) -> Counter[str]:
        alerts = [one for note in inbox.posted.get("/alerts", ()) for one in note["alerts"]]
        return Counter(one["labels"]["summary"] for one in alerts if one["status"] == status)

    # Alerts outlast the anomalies by two minutes. Prometheus misses an anomaly only if each of its
    # workers is killed before the next scrape.
    poll(lambda: notified("resolved") == notified("firing"), lambda: str(notified("resolved")))
    assert set(notified("firing").values()) == {1}
    assert JOBS < len(notified("firing")) <= len(ids)
