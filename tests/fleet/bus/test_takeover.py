"""A partition's messages in another order, read again by the next worker, or lost."""

import asyncio
import math
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from tests.fleet.nodes import NOW, TestCluster, end, seen, step
from tests.manual_clock import ManualClock
from warpwatch_daemon.for_fleet.bus import RecordPublisher
from warpwatch_daemon.for_fleet.record_stream import RecordStream
from warpwatch_detection.anomalies.register import Change
from warpwatch_fleet.bus.partition import Head, Partition
from warpwatch_fleet.cluster import Cluster
from warpwatch_fleet.config import FleetFile
from warpwatch_runtime.agent_metrics import AgentMetrics
from warpwatch_runtime.bus import Bucket, ConflictError, StreamMessage
from warpwatch_telemetry import bus_messages as said
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

    async def get(self, key: str) -> tuple[bytes, int] | None:
        return self._values.get(key)

    async def put(self, key: str, value: bytes, revision: int | None = None) -> int:
        if found := self._values.get(f"{NUMBER}.head"):
            # Until the next head is there, the states that this one names stay as they are.
            jobs = msgspec.msgpack.decode(found[0], type=Head).jobs
            assert not key.startswith(tuple(f"{job.key}." for job in jobs))
        if revision is not None and revision != self._values.get(key, (b"", 0))[1]:
            raise ConflictError(key)
        self._values[key] = value, (revision or 0) + 1
        return (revision or 0) + 1


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
        told += [change for change in await partition.advance() if change.what != "updated"]
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
def test_a_rank_whose_end_was_lost_ends_after_a_gap_or_with_its_node(returns):
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
    assert job.members[0].is_live == returns
    partition.feed(of_a_node(clock.wall() + 60))
    assert not job.live_ranks()
    partition.close()
    partition.feed(of_a_node(clock.wall() + 61))
    assert cluster.nodes == {}


def test_lines_that_are_read_again_are_no_load():
    cluster, bucket = TestCluster().cluster, cast(Bucket, Memory())
    partition = Partition(NUMBER, cluster, bucket, "w", wall=lambda: NOW + 20)
    partition.load = 4.0
    loads = []
    for since, until in ((10, 15), (15, 25)):
        for message in messages():
            if since < message.at - NOW < until:
                partition.feed(message)
        partition.measure()
        loads.append(partition.load)
    # Ranks whose start was not read again count from the start of the worker on.
    assert cluster.count_refused() == {"unknown_rank": 4}
    # About eight lines a second, without those from before the start at 20 s.
    assert loads == [4.0, pytest.approx(4.48, abs=0.1)]
    cluster.remove_partition(NUMBER)
    partition.measure()
    assert partition.load == 0.0
