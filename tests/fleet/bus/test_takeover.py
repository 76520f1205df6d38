"""A partition's messages in another order, read again by the next worker, or lost."""

import asyncio
import itertools
import math
from collections.abc import Iterable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from tests.cases import cases
from tests.fleet.nodes import NOW, TestCluster, end, seen, step
from tests.manual_clock import ManualClock
from warpwatch_daemon.for_fleet.bus import RecordPublisher
from warpwatch_daemon.for_fleet.record_stream import RecordStream
from warpwatch_detection.anomalies.register import Change
from warpwatch_detection.anomalies.snapshot import Snapshot
from warpwatch_fleet.bus.partition import Head, Partition
from warpwatch_fleet.bus.sharing import Greeting, PartitionLeases, Shares
from warpwatch_fleet.bus.worker import BusSource
from warpwatch_fleet.cluster import Cluster
from warpwatch_fleet.config import FleetFile
from warpwatch_fleet.memory import SavedJob
from warpwatch_runtime.agent_metrics import AgentMetrics
from warpwatch_runtime.bus import Bucket, ConflictError, StreamMessage
from warpwatch_telemetry import bus_messages as said
from warpwatch_telemetry.anomalies import Anomaly
from warpwatch_telemetry.jobs import JobId
from warpwatch_telemetry.log import encode_line
from warpwatch_telemetry.records import Clock
from warpwatch_telemetry.stream import CursorLine, encode_stream_line

RUN = seen(0, 2)
NUMBER = said.partition_of(RUN.job_id)
# Both ranks stand still from second 100 to 120.
SECONDS, STANDS = 150, range(100, 120)
CONFIG = FleetFile.model_validate(
    {"detection": {"hang": {"timeout_s": 5, "warmup_timeout_s": 5}}, "anomalies": {"reopen_s": 0}}
)


class Memory:
    """A bucket in memory."""

    def __init__(self) -> None:
        self._values: dict[str, tuple[bytes, int]] = {}
        self._revisions = itertools.count(1)

    async def get(self, key: str) -> tuple[bytes, int] | None:
        return self._values.get(key)

    async def remove(self, key: str, revision: int | None = None) -> None:
        del self._values[key]

    async def put(self, key: str, value: bytes, revision: int | None = None) -> int:
        await asyncio.sleep(0)
        if key != (head := f"{NUMBER}.head") and (found := self._values.get(head)):
            # Until the next head is there, the states that this one names stay as they are.
            jobs = msgspec.msgpack.decode(found[0], type=Head).jobs
            assert not key.startswith(tuple(f"{job.key}." for job in jobs))
        if revision is not None and revision != self._values.get(key, (b"", 0))[1]:
            raise ConflictError(key)
        self._values[key] = value, next(self._revisions)
        return self._values[key][1]


def messages() -> list[StreamMessage]:
    """A message per second of each of two nodes, each late by up to 0.3 s of its own."""
    found = []
    for second in range(1, SECONDS):
        for rank in range(2):
            lines = [encode_line(seen(rank, 2))] if second % 20 == 1 else []
            if second not in STANDS:
                lines += [
                    encode_line(step(rank, 2 * second + half, NOW + second - 1 + 0.5 * half))
                    for half in range(2)
                ]
            late_s = (second + rank) * 7 % 4 / 10
            lines.append(encode_line(Clock(NOW + second)))
            lines.append(encode_stream_line(CursorLine("0-1", f"gpu-{rank}", "0.3.0")))
            subject = said.records_subject(NUMBER, said.Publisher(f"gpu-{rank}"))
            content = said.pack(b"".join(line for line in lines if line))
            at = NOW + second + late_s
            found.append(StreamMessage(subject, f"boot-{second}", content, at))
    return sorted(found, key=lambda message: message.at)


def of_a_node(at: float) -> StreamMessage:
    """A message of a node without a job, which the other reader of the partition has."""
    names = (f"gpu-{number}" for number in range(2, 1000))
    who = said.Publisher(next(one for one in names if said.partition_of_node(one) == NUMBER))
    lines = encode_line(Clock(at)) or b""
    lines += encode_stream_line(CursorLine("0-1", who.node, "0.3.0"))
    return StreamMessage(said.node_subject(who), f"boot-{at:.0f}", said.pack(lines), at)


async def played(replaced_at: float, ahead_s: float = 0.0) -> list[tuple[str, str]]:
    """Return what is reported of which anomaly if another worker takes over at this second.

    ahead_s: by how much the reader of nodes is ahead of that of the job's records.
    """
    bucket = cast(Bucket, Memory())

    def worker(name: str) -> Partition:
        cluster = Cluster(CONFIG.detection, CONFIG.anomalies)
        return Partition(NUMBER, cluster, bucket, name, wall=lambda: NOW)

    before: list[StreamMessage] = []
    told: list[Change] = []
    partition = first = worker("first")
    await partition.resume()
    for message in messages():
        if partition is first and message.at >= NOW + replaced_at:
            partition = worker("second")
            _, repeated = await partition.resume()
            assert shown(repeated) == shown(told)
            told += repeated
            # It commits nothing any more.
            with pytest.raises(ConflictError):
                await first.advance(everything=True)
            for again in before:
                if again.at >= partition.read_since:
                    partition.feed(again)
        partition.feed(of_a_node(message.at + ahead_s))
        partition.feed(message)
        before.append(message)
        # Nobody sees a change before its commit.
        known = {change.anomaly.id: change.what == "opened" for change in told}
        assert known == {one.id: one.end_time is None for one in partition._cluster.anomalies()}
        for found in await asyncio.gather(partition.advance(), partition.advance()):
            told += [change for change in found if change.what != "updated"]
    return [(change.what, change.anomaly.id) for change in told]


@pytest.mark.parametrize("replaced_at", [90, 112, 115, 116.2, 118, 119.8, 121, 124])
def test_a_hang_during_a_takeover_is_one_anomaly(replaced_at):
    told = asyncio.run(played(replaced_at))
    idents = {ident for _, ident in told}
    assert len(idents) == 1
    # The second worker repeats the last report.
    assert set(told) == {(what, ident) for what in ("opened", "closed") for ident in idents}
    assert len(told) <= 4


@pytest.mark.parametrize(("ahead_s", "found"), [(0, 2), (12, 2), (30, 0)])
def test_a_job_is_evaluated_though_its_records_are_read_later_than_the_nodes(ahead_s, found):
    assert len(asyncio.run(played(math.inf, ahead_s))) == found


@pytest.mark.parametrize("returns", [True, False])
def test_a_rank_whose_end_was_lost_ends_after_a_gap_or_with_its_node(returns, monkeypatch):
    cluster, clock = TestCluster().cluster, ManualClock(wall=NOW)
    partition = Partition(NUMBER, cluster, cast(Bucket, Memory()), "w", clock.monotonic)

    async def publish(subject: str, content: bytes, ident: str) -> None:
        if said.read_subject(subject)[1] == NUMBER:
            partition.feed(StreamMessage(subject, ident, content, clock.wall()))

    bus, who = cast(Any, SimpleNamespace(publish=publish)), said.Publisher("gpu-0")
    stream, times = RecordStream(clock.monotonic), (clock.monotonic, clock.wall)
    publisher = RecordPublisher(stream, bus, who, "0.3.0", AgentMetrics(), *times)
    stream.put([RUN])
    asyncio.run(publisher.advance())
    (job,) = cluster.jobs.values()
    stream.put([end(0, NOW)])
    clock.advance(700 if returns else 3700)
    if returns:
        asyncio.run(publisher.advance())
    partition.note_silent()
    assert job.members[0].is_live == returns == any(one.up for one in cluster.nodes.values())
    partition.feed(of_a_node(clock.wall() + 60))
    assert not job.live_ranks()
    *_, node = cluster.nodes.values()
    node.reason, node._ranks = "no record of it for 15 s", {(*RUN.job_id, 7)}
    # It is started again, and counts its messages anew.
    again = of_a_node(clock.wall() + 61)._replace(ident="again-1")
    partition.feed(again)
    assert (node.reason, node.unreported) == ("", {(*RUN.job_id, 7)})
    monkeypatch.setattr("warpwatch_fleet.bus.partition.MAX_TARGETS", len(cluster.nodes))
    partition.feed(again._replace(subject=said.records_subject(NUMBER, said.Publisher("more"))))
    assert cluster.count_refused() == {"too_many_agents": 1}
    partition._uncommitted, cluster.uncommitted = [change("1")], {"1": "opened"}
    cluster.saved = {RUN.job_id: cast(Any, None)}
    partition.close()
    partition.feed(of_a_node(clock.wall() + 61))
    assert not (cluster.nodes or cluster.jobs or cluster.saved or cluster.uncommitted)


def test_lines_that_are_read_again_are_no_load():
    cluster, bucket = TestCluster().cluster, cast(Bucket, Memory())
    partition = Partition(NUMBER, cluster, bucket, "w", wall=lambda: NOW + 20)
    partition.load = 4.0
    loads = []
    for since, until in ((10, 15), (15, 25), (25, 45)):
        for message in messages():
            if since < message.at - NOW < until:
                partition.feed(message)
        partition.measure()
        loads.append(partition.load)
    # Ranks whose start was not read again count from the start of the worker on.
    assert cluster.count_refused() == {"unknown_rank": 4}
    # About eight lines a second, without those from before the start at 20 s.
    assert loads == [4.0, *(pytest.approx(load, abs=0.1) for load in (4.48, 5.6))]
    cluster.remove_partition(NUMBER)
    partition.measure()
    assert partition.load == 0.0


def change(ident: str, what: Any = "opened") -> Change:
    about: Any = {"kind": "straggler", **RUN.job_id.fields()}
    return Change(what, Anomaly(NOW - 70, "warning", "!", id=ident, **about))


def shown(changes: Iterable[Change]) -> str:
    return ", ".join(f"{one.what} {one.anomaly.id}" for one in changes) or "nothing"


class PlayedReader:
    """The reader of one kind of messages of a partition."""

    def __init__(self, said: list[str], *about: Any) -> None:
        _, _, self.subject, self.since, self.receive = about
        self.said = said

    async def check(self) -> None:
        self.said.append(f"{self.subject} is read since {self.since:.0f}")

    async def stop(self) -> None:
        self.said.append(f"{self.subject} is stopped")


class PlayedBus:
    """The connection of two workers, by name, with the buckets of both."""

    is_connected, is_closed = True, False

    def __init__(self, lines: list[str]) -> None:
        self.clock, self.lines, self.leases, self.states = ManualClock(), lines, Memory(), Memory()
        self.workers = {name: self.worker(name) for name in "ab"}

    def worker(self, name: str) -> BusSource:
        def remember(told: Sequence[Anomaly]) -> None:
            self.lines.extend(f"remembered: {one.id}" for one in told)

        own = BusSource(CONFIG, remember, None, lambda: {3}, self.clock.monotonic)
        own.worker, own.bus, own._records = name, cast(Any, self), cast(Any, self)
        own._counts, own._states = cast(Any, self.leases), cast(Any, self.states)
        own._leases = PartitionLeases(own._counts, name, self.clock.monotonic)
        own.shares = Shares(name, self.clock.monotonic)
        return own

    async def send(self, subject: str, content: bytes) -> None:
        for one in self.workers.values():
            one._receive(content)

    async def close(self) -> None:
        self.lines.append("a connection is closed")

    async def work(self, of_others: int) -> int:
        self.lines.append(f"alone, after {of_others}")
        return 5

    def state(self) -> list[str]:
        leases = {key: one[0].decode() for key, one in sorted(self.leases._values.items())}
        lines = [f"leases {leases}, states {sorted(self.states._values)}"]
        for name, own in self.workers.items():
            held = {number: partition.load for number, partition in sorted(own._held.items())}
            about = f"begins {sorted(own._resuming)}, stale {sorted(own._stale)}"
            why = own._complaint.text or own.missing
            lines.append(f"{name} has {held}, {about}, {dict(own.view.count_refused())}: {why}")
        return lines


@pytest.mark.parametrize("name", SCRIPTS := cases(__file__)["workers"])
def test_what_workers_do_with_their_partitions_is_golden(name, golden_case, monkeypatch):
    lines: list[str] = []
    # The first use of a message's form reads its limits.
    msgspec.msgpack.Decoder(Greeting)
    monkeypatch.setattr("warpwatch_fleet.bus.sharing.PARTITIONS", 4)
    monkeypatch.setattr("warpwatch_fleet.bus.worker.MAX_TAKEN_AT_ONCE", 3)
    monkeypatch.setattr("warpwatch_fleet.bus.worker.StreamReader", partial(PlayedReader, lines))

    async def play() -> None:
        bus, now = PlayedBus(lines), list[str]()
        known = {"asyncio": asyncio, "bus": bus, "change": change, **vars(bus), **bus.workers}
        known["message"] = StreamMessage("x", "y-1", b"", 0.0)
        for expression in SCRIPTS[name]:
            lines.append(f"- {expression}")
            found = eval(expression, dict(known))
            found = await found if asyncio.iscoroutine(found) else found
            lines.extend([f"changes: {shown(found)}"] if "evaluate" in expression else [])
            before, now = now, bus.state()
            lines.extend(one for one in now if one not in before)

    asyncio.run(play())
    golden_case("\n".join((*lines, "")))


def test_what_a_partition_commits_is_what_the_next_worker_has(golden_case, caplog, monkeypatch):
    jobs = {name: RUN.job_id._replace(name=name) for name in ("other", "old", "gone")}
    jobs["job"], bucket, lines, head = RUN.job_id, Memory(), list[str](), f"{NUMBER}.head"
    found, late = list[SavedJob](), list[Change]()

    def saved(name: str, time: float, *names: str) -> SavedJob:
        three, known = [change(ident).anomaly for ident in "123"], [jobs[one] for one in names]
        left, own = frozenset("2"), (jobs[name], *known)
        return SavedJob(jobs[name], own, Snapshot({}), (three[0],), (*three[1:],), left, NOW + time)

    # The state of a job of another partition.
    there = {jobs["gone"]: saved("gone", 0)}
    monkeypatch.setattr("warpwatch_fleet.bus.partition.MAX_MESSAGE_BYTES", 70)

    async def worker(name: str) -> None:
        one: Any = Partition(
            NUMBER, Cluster(CONFIG.detection, CONFIG.anomalies, there), cast(Any, bucket), name
        )

        def to_save(now: float, changed: set[JobId], number: int) -> list[SavedJob]:
            lines.append(f"changed: {sorted(job.name for job in changed)}")
            one._uncommitted += late
            return found

        one._cluster.to_save, one._cluster.jobs_of = to_save, lambda _: {jobs["job"]: None}
        reported, changes = await one.resume()
        lines.append(f"reads {one.read_since - NOW:.0f}, {shown(changes)} again")
        lines.append(f"reported {[anomaly.id for anomaly in reported]}")
        lines.append(f"saved {[(by.name, job.id.name) for by, job in one._cluster.saved.items()]}")
        known[name] = one

    async def advance(one: Any, time: float, **how: bool) -> None:
        one.time = NOW + time
        lines.append(shown(await one.advance(**how)))
        now = msgspec.msgpack.decode(bucket._values[head][0], type=Head)
        about = [(job.id.name, job.key, job.chunks, job.time - NOW) for job in now.jobs]
        pending = [(effect.time - NOW, effect.change.anomaly.id) for effect in now.pending]
        forgotten = [job.name for job in one._cluster.forgotten]
        lines.append(f"{now.writer}: {about}, pending {pending}")
        lines.append(f"{one._cluster.uncommitted}, forgotten {forgotten}")

    known = {"jobs": jobs, "bucket": bucket, "found": found, "late": late, "saved": saved}
    known |= {"worker": worker, "advance": advance, "change": change, "head": head}

    async def play() -> None:
        for expression in cases(__file__)["commits"]:
            lines.append(f"- {expression}")
            result = eval(expression, known)
            if asyncio.iscoroutine(result):
                await result

    asyncio.run(play())
    golden_case("\n".join((*lines, *caplog.messages, "")))
