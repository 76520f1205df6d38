"""Workers on a real nats-server: who evaluates what, and that each anomaly is one."""

import asyncio
import contextlib
import functools
import gc
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import psutil
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route

from tests.cases import cases
from tests.exporters import states
from tests.fleet.bus.server import Fabric, NatsServer, until
from tests.fleet.nodes import NOW, TestCluster, TestNode, seen, step
from tests.manual_clock import ManualClock
from tests.waiting import DEADLINE_S
from warpwatch_daemon.for_fleet.bus import BusAgent, BusReplies
from warpwatch_detection.anomalies.register import Change
from warpwatch_fleet.agent_link import AgentError, BusLinks
from warpwatch_fleet.bus.fleet import SharedSessions, Views, WorkerDetails, WorkerFleet, WorkerView
from warpwatch_fleet.bus.partition import Partition, target_of
from warpwatch_fleet.bus.sharing import (
    CERTAIN_S,
    RENEW_INTERVAL_S,
    Greeting,
    PartitionLeases,
    Shares,
)
from warpwatch_fleet.bus.streams import LEASES
from warpwatch_fleet.bus.worker import BusSource
from warpwatch_fleet.cli import _create_streams
from warpwatch_fleet.config import FleetFile
from warpwatch_fleet.targets import Target
from warpwatch_runtime.agent_metrics import AgentMetrics
from warpwatch_runtime.bus import Bucket, Bus, BusError, StreamMessage, StreamReader, Turns
from warpwatch_serving.access import Caller
from warpwatch_serving.answers import HttpError
from warpwatch_telemetry import bus_messages as said
from warpwatch_telemetry.alerts import Alert, NotReadyError
from warpwatch_telemetry.anomalies import Anomaly
from warpwatch_telemetry.captures import CaptureRequest
from warpwatch_telemetry.errors import Refused, UsageError
from warpwatch_telemetry.jobs import JobId
from warpwatch_telemetry.state import JobState, State

STEPS = 300
SLOW_FROM = 200
NODE = said.Publisher("gpu-1")
JOB = JobId("ns/team", "llama", "41")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[NatsServer]:
    server = NatsServer(tmp_path)
    yield server
    server.kill()


class Play:
    """Two nodes with a job, and the workers that evaluate it."""

    def __init__(self, server: NatsServer, folder: Path) -> None:
        self.server = server
        self.fabric = Fabric(server)
        self.folder = folder
        self.clock = ManualClock()
        self.nodes = [TestNode("gpu-1"), TestNode("gpu-2")]
        self.now = time.time()
        self.agents: list[Any] = []
        self.changes: dict[str, list[Change]] = {}

    async def begin(self) -> None:
        await self.fabric.create()
        for number, node in enumerate(self.nodes):
            node.say(*(seen(2 * number + rank, time=self.now - 400) for rank in range(2)))
            agent = await self.fabric.agent(node, lambda: self.now, self.clock.monotonic)
            self.agents.append(agent)

    async def train(self) -> None:
        """Publish steps of two ranks a node; from SLOW_FROM on rank 3 computes longer."""
        for number in range(1, STEPS):
            is_slow = number >= SLOW_FROM
            at, took_s = self.now - 0.5 * (STEPS - number), 0.5 + 0.3 * is_slow
            for rank in range(4):
                phases = {"comm": 0.02 + (0.3 if is_slow and rank != 3 else 0.0)}
                self.nodes[rank // 2].say(step(rank, number, at, took_s, phases_s=phases))
            if number % 50 == 0:  # an evaluation between two agents waits for 64 steps
                for agent in self.agents:
                    await agent.advance()

    async def worker(self) -> BusSource:
        worker = self.fabric.worker(self.clock.monotonic)
        await worker.start()
        self.changes[worker.worker] = []
        return worker

    async def round(self, *workers: BusSource) -> None:
        self.clock.advance(0.5)
        for agent in self.agents:
            await agent.advance()
        for worker in workers:
            for _, work in worker.rounds:
                await work()
            changes = await worker.evaluate()
            self.changes[worker.worker] += [one for one in changes if one.what != "updated"]

    def found(self, worker: BusSource) -> list[tuple[str, str, str]]:
        changes = self.changes[worker.worker]
        return [(one.what, one.anomaly.kind, one.anomaly.id) for one in changes]


def on_the_bus(test: Callable[[Play], Awaitable[None]]) -> Callable[[NatsServer, Path], None]:
    """Run the test in one event loop, on a server of its own."""

    async def whole(play: Play) -> None:
        try:
            await play.begin()
            await test(play)
        finally:
            await play.fabric.close()

    def run(server: NatsServer, tmp_path: Path) -> None:
        asyncio.run(whole(Play(server, tmp_path)))
        gc.collect()  # a connection that was left open is an error of this test

    return run


@on_the_bus
async def test_an_anomaly_keeps_its_id_when_another_worker_continues(play: Play) -> None:
    first = await play.worker()
    await until(lambda: not first.missing, lambda: play.round(first))
    for bus in (first.bus, first._records):
        assert first._leases.bucket is first._counts
        await bus.client.close()  # as the library does after an error of the server
        await play.round(first)
        assert first._stale
        await until(lambda: not first._stale | first._resuming.keys(), lambda: play.round(first))
    # The reply to a commit was lost: the partition is read anew from its head.
    first._held[said.partition_of(JOB)]._revision += 1
    await play.train()
    await until(lambda: play.found(first) and not first.missing, lambda: play.round(first))
    ((what, kind, ident),) = play.found(first)
    assert (what, kind) == ("opened", "straggler")
    assert len(first.evaluated()) == 64
    (shown,) = first.view.anomalies()
    assert (shown.id, shown.node, shown.rank) == (ident, play.nodes[1].name, 3)
    await first.close()
    second = await play.worker()
    await until(lambda: JOB in second.view.jobs, lambda: play.round(second))
    # The report may have been lost, so it is repeated with the same id.
    assert set(play.found(second)) <= {("opened", "straggler", ident)}
    assert [one.id for one in second.view.anomalies()] == [ident]
    assert second.view.count_refused() == {}
    assert all(one._since > 0 for one in second._held[said.partition_of(JOB)].readers)
    play.clock.advance(20)
    await second._check()
    assert {node.up for node in second.view.nodes.values()} == {False}


@on_the_bus
async def test_a_worker_gets_its_share_and_gives_it_back_at_its_end(play: Play) -> None:
    first = await play.worker()
    await until(lambda: not first.missing, lambda: play.round(first))
    second = await play.worker()
    await until(
        lambda: min(len(second.evaluated()), len(first.evaluated())) > 10 and not second.missing,
        lambda: play.round(first, second),
    )
    assert not first.evaluated().keys() & second.evaluated().keys()
    await first.close()
    await until(lambda: not second.missing, lambda: play.round(second))


@on_the_bus
async def test_a_slow_partition_delays_no_other_and_is_greeted_for(play: Play) -> None:
    slow, is_read = 7, asyncio.Event()

    class SlowPartition(Partition):
        async def resume(self) -> Any:
            if self.number == slow:
                await is_read.wait()
            return await super().resume()

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("warpwatch_fleet.bus.worker.Partition", SlowPartition)
        both = [await play.worker() for _ in range(2)]
        rounds = functools.partial(play.round, *both)
        await until(lambda: sum(len(one.evaluated()) for one in both) == 63, rounds)
        # Its own worker alone misses it.
        await until(lambda: sum(len(one.missing) for one in both) == 1, rounds)
        is_read.set()
        await until(lambda: not any(one.missing for one in both), rounds)


@on_the_bus
async def test_what_an_agent_says_for_others_is_refused_and_counted(play: Play) -> None:
    worker = await play.worker()
    await until(lambda: not worker.missing, lambda: play.round(worker))
    tenant = said.Publisher("gpu-9", "ns/own")
    bus = play.agents[0].bus
    job = JobId("ns/other", "theirs", "1")
    number = said.partition_of(job)
    lines = [b'{"type":"clock","time":%.1f}' % play.now]
    lines += [
        b'{"type":"rank","time":%.1f,"job":"theirs","rank":0,"world_size":1,"owner":"%s"}'
        % (play.now, owner)
        for owner in (b"ns/other", b"ns/own")
    ]
    lines.append(b'{"type":"cursor","cursor":"1","node":"gpu-8"}')
    content = said.pack(b"\n".join(lines))
    await bus.publish(said.records_subject(number, tenant), content, "boot-1")
    # One message again, and invalid ones.
    await bus.publish(said.records_subject(number, tenant), content, "boot-01")
    await bus.publish(f"warpwatch.records.{number}.node.a", b"", "boot-2")
    await bus.publish(said.records_subject(number, tenant), b"no gzip", "boot-3")
    await bus.publish(said.records_subject(number, tenant), content[:-4], "boot-4")
    await until(lambda: sum(worker.view.count_refused().values()) > 5, lambda: play.round(worker))
    assert worker.view.count_refused() == {
        "other_owner": 1, "other_partition": 1, "other_node": 1, "bad_subject": 1,
        "unreadable": 2,
    }  # fmt: skip


@on_the_bus
async def test_a_session_is_one_of_all_workers_and_a_users_17th_ends_the_first(play: Play) -> None:
    first, second = [SharedSessions(await play.worker()) for _ in range(2)]
    me, they = Caller(1, captures=True), Caller(2)
    mine, theirs = await first.issue(me), [await first.issue(they) for _ in range(17)]
    assert [await second.find(key) for key in (mine, *theirs[::16], "")] == [me, None, they, None]
    assert [await second.end(mine), await first.find(mine)] == [me, None]
    # One cookie for all: they are one page.
    assert first.site == second.site == play.server.url
    play.server.kill()
    await until(lambda: not first._worker.bus.is_connected, lambda: asyncio.sleep(0))
    with pytest.raises(HttpError) as refused:
        await first.find(theirs[16])
    assert (refused.value.status, refused.value.reason) == (503, "bus_away")


def spread(loads: dict[Any, float]) -> dict[int, float]:
    """Return the load of each partition; a key is a number or a range."""
    ends = {key: [int(end) for end in str(key).split("-")] for key in loads}
    return {one: loads[key] for key, at in ends.items() for one in range(at[0], at[-1] + 1)}


def test_the_load_is_shared(golden_case):
    lines = []
    for name, about in cases(__file__)["loads"].items():
        clock = ManualClock()
        shares, began_s = Shares("a", clock.monotonic), about.pop("began_s", 12.0)
        busy, greeted_s = about.pop("busy", ()), about.pop("greeted_s", 1.0)
        own = spread(about.pop("a"))
        clock.advance(max(0.0, began_s - greeted_s))
        for other, loads in (*about.items(), ("a", dict.fromkeys(range(64), 9.0))):
            shares.receive(Greeting(other, spread(loads)))
        clock.advance(min(began_s, greeted_s))
        found = {"takes": shares.to_take(own), "gives": shares.to_give(own, busy)}
        known = [shares.load_of(number) for number in (0, 1, 63)]
        lines.append(f"{name}: {found}, loads {known}\n")
    golden_case("".join(lines))


def test_a_backlog_of_messages_delays_no_renewal_and_no_reader():
    clock, applied = ManualClock(), Counter[int]()
    turns, uncertain = Turns(clock.monotonic), []

    class Slow:
        async def put(self, *about: Any) -> int:
            # A message to the server and its reply take some iterations of the loop.
            for _ in range(6):
                await asyncio.sleep(0)
            return 1

    async def test() -> None:
        leases = PartitionLeases(cast(Bucket, Slow()), "a", clock.monotonic)
        await asyncio.gather(*map(leases.acquire, range(64)))

        async def read(number: int) -> None:
            for _ in range(20):
                await turns.run(lambda: clock.advance(0.1))
                applied[number] += 1
                uncertain.extend([] if leases.is_certain(number) else [number])
                assert max(applied.values()) <= min(applied.values()) + 2

        async def renew() -> None:
            while min(applied.values()) < 20:
                await asyncio.gather(*map(leases.renew, range(64)))
                until = clock.monotonic() + RENEW_INTERVAL_S
                while clock.monotonic() < until and min(applied.values()) < 20:
                    await asyncio.sleep(0)

        applied.update(dict.fromkeys(range(64), 0))
        await asyncio.gather(renew(), *map(read, range(64)))

    asyncio.run(test())
    assert uncertain == []

    class Late(Slow):
        async def put(self, *about: Any) -> int:
            clock.advance(2.0)
            return 1

    late = PartitionLeases(cast(Bucket, Late()), "a", clock.monotonic)
    asyncio.run(late.acquire(1))
    clock.advance(CERTAIN_S - 2.0)
    assert not late.is_certain(1)


@on_the_bus
async def test_a_lease_that_has_expired_is_renewed_while_no_other_has_it(play: Play) -> None:
    bucket = await play.agents[0].bus.bucket(LEASES)
    leases = PartitionLeases(bucket, "a")
    assert await leases.acquire(7)
    _, revision = await bucket.get("p.7") or (b"", 0)
    await bucket.remove("p.7", revision)
    assert await leases.renew(7) and leases.is_certain(7)
    other = PartitionLeases(bucket, "b")
    assert not await other.acquire(7)
    _, revision = await bucket.get("p.7") or (b"", 0)
    await bucket.remove("p.7", revision)
    assert await other.acquire(7)
    for mine in (leases, other):
        assert [await mine.renew(7), mine.is_certain(7)] == [mine is other] * 2
    await leases.release(7)
    assert await bucket.get("p.7") and await other.renew(7)
    await other.release(7)
    # A renewal that comes after the release takes nothing.
    assert (await other.renew(7), other.is_certain(7), await bucket.get("p.7")) == (
        True,
        False,
        None,
    )


@on_the_bus
async def test_a_long_reply_comes_in_parts_and_nobody_is_an_error(play: Play) -> None:
    bus, other = play.agents[0].bus, asyncio.Event()
    content = b"x" * (3 * 2**19 + 1)

    async def answer(operation: str, body: bytes) -> bytes:
        # A request that takes long delays no other.
        other.set() if body else await other.wait()
        return content if operation == "get.a" else body

    await bus.serve("warpwatch.node.X", answer)
    slow = asyncio.create_task(bus.request("warpwatch.node.X.get.a", b""))
    assert await bus.request("warpwatch.node.X.post", b"body") == b"body"
    assert await slow == content
    open_before = len(bus.client._subs)
    assert await bus.request("warpwatch.node.X.post", b"") == b""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(BusError, match="than 3 chunks"):
        patch.setattr("warpwatch_runtime.bus.MAX_CHUNKS", 3)
        await bus.request("warpwatch.node.X.get.a", b"")
    assert len(bus.client._subs) == open_before
    with pytest.raises(BusError, match="nothing answers"):
        await bus.request("warpwatch.node.Y.get", b"")
    said = f"the bus {play.server.url}: WARPWATCH: replicas > 1 not supported"
    with pytest.raises(UsageError, match=f"^{said}"):
        await asyncio.to_thread(_create_streams, play.fabric.config, 2)


@on_the_bus
async def test_an_agent_answers_a_request_for_a_file_as_its_api_does(play: Play) -> None:
    file = play.folder / "rank0.reduction.gz"
    file.write_bytes(b"r" * (2**19 + 1))

    async def send(request: Request) -> Response:
        return FileResponse(file)

    app = Starlette(routes=[Route("/api/v1/captures/{id}/{file}", send)])
    links = BusLinks(play.agents[0].bus)
    links.loop = asyncio.get_running_loop()
    who = said.Publisher("gpu-1")
    await links.bus.serve(who.requests, BusReplies(app).reply)
    link = links.link(target_of(who, None))
    found = await asyncio.to_thread(lambda: b"".join(link.download("captures/a/b.gz")))
    assert found == file.read_bytes()
    with pytest.raises(AgentError, match="404"):
        await link.request("leases/../captures", {})


@on_the_bus
async def test_what_one_worker_does_alone_no_other_does_meanwhile(play: Play) -> None:
    first, second = await play.worker(), await play.worker()
    await until(lambda: first.evaluated() and second.evaluated(), lambda: play.round(first, second))
    done: list[str] = []

    async def inner(of_others: int) -> int:
        done.append(f"inner {of_others}")
        return 2

    async def outer(of_others: int) -> int:
        await second.alone(inner)
        done.append(f"outer {of_others}")
        return 3

    for worker, what in ((first, outer), (second, inner), (first, outer)):
        await worker.alone(what)
    assert done == ["outer 0", "inner 3", "outer 2"]


def test_all_partitions_of_a_worker_together_keep_to_the_limits(monkeypatch):
    monkeypatch.setattr("warpwatch_fleet.cluster.MAX_JOBS", 4)
    monkeypatch.setattr("warpwatch_fleet.cluster.MAX_WAITING", 100)
    worker = BusSource(FleetFile.model_validate({}), lambda told: None)
    nodes = [TestNode("gpu-0"), TestNode("gpu-1")]
    worker.view.set_targets({node.address: Target(node.address) for node in nodes})
    for number, count in enumerate((6, 3)):
        node = nodes[number]
        node.say(*(seen(0, 1, f"job-{job}", owner=f"ns/{number}") for job in range(count)))
        worker.view.feed(node.address, node.lines(NOW), NOW)
    owners = Counter(job.owner for job in worker.view.jobs)
    assert (owners, worker.view.refused) == ({"ns/0": 2, "ns/1": 2}, {"too_many_jobs": 5})
    assert [job.name for job in worker.view.jobs] == ["job-0", "job-1"] * 2
    for count, job in enumerate(worker.view.jobs.values(), 30):
        for number in range(count):
            job.waiting.add(step(0, number, NOW + number))
    asyncio.run(worker.evaluate())
    assert sorted(len(job.waiting) for job in worker.view.jobs.values()) == [0, 30, 31, 32]


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/metrics", []), ("/api/v1/anomalies", ["view"]), ("/api/v1/ranks", ["view", "details"]),
        ("/api/v1/detectors", ["view", "details"]), ("/", ["view", "details"]),
        ("/api/v1/alertmanager", ["view", "details"]),
    ],
)  # fmt: skip
def test_ranks_of_other_workers_are_fetched_once_and_where_they_are_shown(monkeypatch, path, asked):
    monkeypatch.setattr("warpwatch_fleet.bus.fleet.FRESH_S", DEADLINE_S)

    class Asking(WorkerFleet):
        def __init__(self) -> None:
            self._views = Views("view", WorkerView, 1.0)
            self._details = Views("details", WorkerDetails, 1.0)
            links = SimpleNamespace(run=lambda work: asyncio.ensure_future(work()))
            self._worker = cast(Any, SimpleNamespace(links=links))
            self.asked: list[str] = []

        async def _request_all(self, operation: str, *more: Any) -> dict[str, bytes]:
            await asyncio.sleep(0)
            self.asked.append(operation)
            return {}

        async def see(self) -> None:
            await self.prepare(path)
            self.asked.append("seen")

    async def both(fleet: Asking) -> list[str]:
        await asyncio.gather(fleet.see(), fleet.see())
        return fleet.asked

    assert asyncio.run(both(Asking())) == [*asked, "seen", "seen"]


def test_an_alert_is_of_a_rank_and_of_a_capture_that_another_worker_has(tmp_path):
    own = {"listen": "127.0.0.1:0", "state_dir": str(tmp_path)}
    bus = {"url": "nats://127.0.0.1:1"}
    fleet = WorkerFleet(FleetFile.model_validate({"bus": bus, "fleet": own}))
    firing = [Alert(status="firing", labels={"training_job": states.rank(0).job}, starts_at="1")]
    with pytest.raises(NotReadyError):
        fleet.receive_alerts(firing, "")
    fleet._source = cast(Any, SimpleNamespace(missing=()))
    fleet._details.of = {"other": WorkerDetails((states.rank(0),))}
    (found,) = fleet.receive_alerts(firing, "")
    assert found.detail == "the fleet is starting"
    request = replace(states.CAPTURE.request, alerts=(firing[0].key,))
    known = replace(states.CAPTURE, time=9e9, request=request)
    fleet._views.of = {"other": WorkerView(State(NOW, "1", "w", captures=(known,)))}
    (found,) = fleet.receive_alerts(firing, "")
    assert (found.outcome, found.capture_id) == ("duplicate", states.CAPTURE.id)
    jobs = tuple(JobState("llama", 2, ("0", "1"), owner=owner) for owner in ("ns/a", "ns/b"))
    fleet._views.of = {"other": WorkerView(State(NOW, "1", "w", jobs=jobs))}
    with pytest.raises(Refused, match="a job of each of ns/a, ns/b; name the owner"):
        fleet.request_capture(CaptureRequest("llama", "torch", "manual"))
    wanted = CaptureRequest("llama", "torch", "straggler", anomaly_id="6553f100-1")
    assert not fleet.captures.is_mine(JOB)
    fleet._worker._held[said.partition_of(JOB)] = cast(Any, None)
    assert fleet.captures.is_mine(JOB)
    # Another worker that goes on with the anomaly names its capture the same.
    assert fleet.captures._name_of(wanted) == "20231114T221320-a2e8e1"
    me, value = psutil.Process(), fleet.metrics.registry.get_sample_value
    used: dict[str, float] = {"start_timestamp_seconds": me.create_time()}
    used |= {"resident_memory_bytes": me.memory_info().rss, "open_files": me.num_fds()}
    used |= {"threads": me.num_threads(), "cpu_seconds_total": sum(me.cpu_times()[:2])}
    for name, amount in used.items():
        assert value(f"warpwatch_agent_{name}") == pytest.approx(amount, 0.01)
    fleet.server.stop()
    fleet.server.run()


def test_a_fault_of_a_device_is_shown_once_though_two_streams_of_its_agent_have_it():
    cluster, node = TestCluster().cluster, TestNode("gpu-1")
    node.stream.put_anomaly(Anomaly(NOW, "critical", "!", job="llama", id="1", kind="xid"))
    lines = node.lines(NOW)
    for partition in (None, 5):
        cluster.add_node(target := target_of(NODE, partition))
        cluster.feed(target.address, lines, NOW)
    node.stream.put_anomaly(Anomaly(NOW, "warning", "!", job="llama", id="2", kind="oom"))
    cluster.feed(target.address, node.lines(NOW), NOW)
    assert [one.id for one in cluster.anomalies()] == ["1@gpu-1", "2@gpu-1"]


@on_the_bus
async def test_no_old_clock_waits_for_a_server_that_is_away_and_readers_go_on(play: Play) -> None:
    bus, received = play.agents[0].bus, list[bytes]()

    async def publish(line: bytes, ident: str) -> None:
        await bus.publish(said.records_subject(1, NODE), said.pack(line), ident)

    async def publish_again() -> None:
        with contextlib.suppress(BusError):
            await publish(b"new", "boot-2")
            play.clock.advance(12)
            await reader.check()

    def receive(message: StreamMessage) -> None:
        received.extend(said.unpack(message.content))

    subject = "warpwatch.records.1.>"
    reader = StreamReader(bus, said.STREAM, subject, play.now, receive, play.clock.monotonic)
    await reader.start()
    await publish(b"first", "boot-0")
    await until(lambda: received, reader.check)
    play.server.kill()
    await until(lambda: not bus.is_connected, publish_again)
    with pytest.raises(BusError, match="away"):
        await publish(b"old", "boot-1")
    play.server.start()
    await until(lambda: received[1:], publish_again)
    read, turns = reader._expected, bus.turns
    bus.turns = Turns(lambda: math.inf)  # a message waits for its turn for ever
    await publish(b"last", "boot-3")
    await until(lambda: reader._expected > read, functools.partial(asyncio.sleep, 0))
    bus.turns = turns
    await reader.start()
    await until(lambda: received[2:], reader.check)
    assert received == [b"first", b"new", b"last"]


@on_the_bus
async def test_an_attempt_to_connect_that_is_given_up_leaves_nothing_open(play: Play) -> None:
    for turns in range(40):
        bus = Bus(play.fabric.config, "agent.early")
        connecting = asyncio.create_task(bus.connect())
        for _ in range(turns):
            await asyncio.sleep(0)
        connecting.cancel()
        await asyncio.wait([connecting])
        await bus.close()
    await play.agents[0].bus.connect()


@on_the_bus
async def test_an_agent_publishes_after_it_was_refused_and_its_last_lines(play: Play) -> None:
    lines: list[bytes] = []
    node = TestNode("gpu-9")
    about = (play.fabric.config, "gpu-9", "0.3.0", node.stream, Starlette(), AgentMetrics())
    BusAgent(*about).close()
    agent = BusAgent(*about)
    running = asyncio.create_task(asyncio.to_thread(agent.run))
    await until(lambda: agent._bus.is_connected, play.agents[0].advance)
    play.server.reload("authorization {token: other}")
    await running
    play.server.reload("")
    await play.agents[0].bus.connect()
    await play.agents[0].bus.listen(
        "warpwatch.records.>", lambda batch: lines.extend(said.unpack(batch))
    )
    node.say(seen(0, 1, "first"))
    running = asyncio.create_task(asyncio.to_thread(agent.run))
    await until(lambda: lines, play.agents[0].advance)
    node.say(seen(0, 1, "last"))
    agent.close()
    await running
    await asyncio.to_thread(agent.run)
    await until(lambda: any(b'"last"' in line for line in lines), play.agents[0].advance)
