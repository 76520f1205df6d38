"""Agents as a cluster hears of them: real streams, a clock of the test's, no network."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from warpwatch_daemon.for_fleet.record_stream import Portion, RecordStream
from warpwatch_detection.anomalies.register import Change
from warpwatch_detection.config import AnomaliesConfig, DetectionConfig
from warpwatch_fleet.cluster import Cluster
from warpwatch_fleet.memory import JobStateStore
from warpwatch_fleet.targets import Target
from warpwatch_telemetry.anomalies import Anomaly
from warpwatch_telemetry.jobs import RunSummary
from warpwatch_telemetry.log import encode_line
from warpwatch_telemetry.records import Clock, End, RankSeen, Record, Step
from warpwatch_telemetry.stream import CursorLine, encode_stream_line

NOW = 1_790_000_000.0
OWNER = "ns/team"


class TestNode:
    """One agent. ahead_s: by how much its clock is ahead."""

    __test__ = False

    def __init__(self, name: str, ahead_s: float = 0.0, address: str = "") -> None:
        self.name = name
        self.address = address or f"{name}:9400"
        self.ahead_s = ahead_s
        self.stream = RecordStream()
        self.cursor: str | None = self.stream.portion(None).cursor

    def say(self, *records: Record) -> None:
        self.stream.put(records)

    def lines(self, now: float) -> list[bytes]:
        portion = self.stream.portion(self.cursor)
        self.cursor = portion.cursor
        return sent(portion, self.name, now + self.ahead_s)


def sent(portion: Portion, name: str, now: float) -> list[bytes]:
    """Return the lines that an agent sends of a portion of its stream."""
    clock = encode_line(Clock(now)) or b""
    end = encode_stream_line(CursorLine(portion.cursor, name, "0.1.0"))
    return (portion.text() + clock + end).splitlines()


class TestCluster:
    """A fleet's memory and some agents; ``pass_s`` lets time go on."""

    __test__ = False

    def __init__(self, *nodes: TestNode, **labels: str) -> None:
        self.now = NOW
        self.nodes = nodes
        self.cluster = Cluster(DetectionConfig(), AnomaliesConfig())
        self.labels = labels
        self.steps = 0
        self.changes: list[Change] = []
        self.evaluate: Callable[[], list[Change]] = lambda: self.cluster.evaluate(self.now)
        self.cluster.set_targets({one.address: Target(one.address, labels) for one in nodes})

    def hear(self, *nodes: TestNode) -> None:
        for node in nodes or self.nodes:
            self.cluster.feed(node.address, node.lines(self.now), self.now)
            self.cluster.nodes[node.address].up = True
        self.cluster.drop_waiting()
        self.changes += self.evaluate()

    def restart(self, folder: Path, *, forget: bool = False) -> None:
        """Another fleet goes on in the place of this one. forget: agents have kept no lines."""
        for node in self.nodes:
            if forget:
                node.stream = RecordStream()
            node.cursor = None
        self.cluster = Cluster(DetectionConfig(), AnomaliesConfig(), JobStateStore(folder).load())
        targets = {one.address: Target(one.address, self.labels) for one in self.nodes}
        self.cluster.set_targets(targets)
        self.changes.clear()

    def save(self, folder: Path) -> None:
        saved = self.cluster.to_save(self.now, [one.id for one in self.cluster.jobs.values()])
        JobStateStore(folder).keep(saved, self.cluster.forgotten)

    def raised(self) -> list[str]:
        return [one.anomaly.kind for one in self.changes if one.what == "opened"]

    def anomalies(self) -> list[Anomaly]:
        return list(self.cluster.anomalies())

    def job(self) -> Any:
        (job,) = self.cluster.jobs.values()
        return job


def seen(rank: int, world: int = 4, job: str = "llama", **fields: Any) -> RankSeen:
    about: dict[str, Any] = {"time": NOW, "owner": OWNER, "run": "41"} | fields
    return RankSeen(job=job, rank=rank, world_size=world, **about)


def step(
    rank: int, number: int, time: float, duration_s: float = 0.5, job: str = "llama", **fields: Any
) -> Step:
    return Step(time, job, rank, number, duration_s, **{"owner": OWNER, "run": "41"} | fields)


def end(rank: int | None, time: float) -> End:
    return End(time, "llama", rank, owner=OWNER, run="41")


def run(*ranks: int, **fields: Any) -> RunSummary:
    about: dict[str, Any] = {"world_size": 4, "ranks": ranks, "steps": 100, "judged_steps": 80}
    about |= {"time": NOW + 60, "first_time": NOW, "tokens_per_s": 1000.0, "tokens_per_step": 500.0}
    return RunSummary(**{"owner": OWNER, "job": "llama", "run": "41"} | about | fields)
