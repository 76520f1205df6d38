"""The ranks of a job over its nodes, and the detectors that see them all."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import msgspec

from warpwatch_daemon.ranks.counts import RankCounts, RecentSteps
from warpwatch_detection.anomalies.changes import Change
from warpwatch_detection.config import AnomaliesConfig, DetectionConfig
from warpwatch_detection.engine import Detection
from warpwatch_fleet.merging import Merger
from warpwatch_telemetry.anomalies import FLEET_KINDS, Anomaly
from warpwatch_telemetry.jobs import JobId
from warpwatch_telemetry.records import Clock, End, RankEvent, RankSeen, Record, Step
from warpwatch_telemetry.state import JobState, RankState

JobRecord = RankSeen | Step | RankEvent | End


@dataclass(slots=True)
class Member:
    """One rank of the job, on the node of this address."""

    node: str
    seen: RankSeen
    status: str = "running"
    silent_reason: str | None = None
    step: int | None = None
    last_step_time: float | None = None
    samples: int = 0
    tokens: int = 0
    steps: int = 0
    memory_allocated_bytes: int | None = None
    phases_s: dict[str, float] = field(default_factory=dict)
    counts: RankCounts = field(default_factory=RankCounts)
    recent: RecentSteps = field(default_factory=RecentSteps)

    @property
    def is_live(self) -> bool:
        return self.status in ("running", "stopped")

    def take(self, record: JobRecord) -> None:
        if isinstance(record, Step):
            self._take_step(record)
        elif isinstance(record, End):
            self.status = "exited"
        elif isinstance(record, RankEvent) and record.event in ("died", "stopped", "resumed"):
            self.status = "running" if record.event == "resumed" else record.event
            reason = record.detail.get("silent_reason")
            self.silent_reason = str(reason)[:32] if record.event == "stopped" else None

    def _take_step(self, step: Step) -> None:
        self.step, self.last_step_time = step.step, step.time
        self.steps += 1
        self.samples += step.samples
        self.tokens += step.tokens
        self.memory_allocated_bytes = step.memory_allocated_bytes
        for name, seconds in step.phases_s.items():
            if name in self.phases_s or len(self.phases_s) < 16:
                self.phases_s[name] = self.phases_s.get(name, 0.0) + seconds
        self.counts.add_step(step.duration_s)
        self.recent.add(step)

    def state(self, job: JobId, host: str) -> RankState:
        return RankState(
            rank=self.seen.rank,
            name=str(self.seen.rank),
            **job.fields(),
            pid=0,
            host=host,
            world_size=self.seen.world_size,
            device=self.seen.device,
            status=self.status,
            silent_reason=self.silent_reason,
            first_time=self.seen.time,
            seen_time=self.seen.time,
            last_step_time=self.last_step_time,
            step=self.step,
            steps_total=self.steps,
            samples_total=self.samples,
            tokens_total=self.tokens,
            phases_s=dict(self.phases_s),
            durations=self.counts.durations,
            recent_s=tuple(self.recent),
            **(self.recent.throughput() if self.is_live else {}),
            memory_allocated_bytes=self.memory_allocated_bytes,
        )


class FleetJob:
    """``nodes``: by address, what the job is called there. judged: whether by the fleet.

    A job of one node is its agent's; the fleet shows it and judges only what several nodes have.
    """

    def __init__(
        self, job: JobId, seen: RankSeen, kinds: DetectionConfig, anomalies: AnomaliesConfig
    ) -> None:
        self.id = job
        self.world_size = seen.world_size
        self.master = seen.master
        self.begin_time = seen.time
        self.members: dict[int, Member] = {}
        self.nodes: dict[str, JobId] = {}
        # Monotonic; since when all of its processes are gone.
        self.ended_at: float | None = None
        self._kinds = kinds
        self._anomalies = anomalies
        self._merger = Merger()
        self._time = -math.inf
        self._skip = False
        self.detection: Detection | None = None

    @property
    def judged(self) -> bool:
        return self.detection is not None

    def run_of(self, node: str) -> str:
        return self.nodes[node].run

    def live_nodes(self) -> set[str]:
        return {member.node for member in self.members.values() if member.is_live}

    # --- what nodes say ---

    def join(self, node: str, seen: RankSeen) -> bool:
        """A rank of it runs on the node; False where another node has this rank alive."""
        before = self.members.get(seen.rank)
        if before is not None and before.is_live and before.node != node:
            return False
        self.nodes[node] = seen.job_id
        self.ended_at = None
        if before is None or before.node != node:
            self.members[seen.rank] = Member(node, seen)
        else:
            before.status = "running"
        self.world_size = seen.world_size
        if self.judged:
            self._merger.add(self._as_ours(seen))
        elif len(self.nodes) > 1:
            self._begin_to_judge()
        return True

    def take(self, node: str, record: Step | RankEvent | End) -> None:
        for one in self._of_ranks(node, record):
            member = self.members.get(one.rank if one.rank is not None else -1)
            if member is None or member.node != node:
                continue
            member.take(one)
            if self.judged:
                self._merger.add(self._as_ours(one))

    def _of_ranks(
        self, node: str, record: Step | RankEvent | End
    ) -> Iterable[Step | RankEvent | End]:
        """The end of the job on one node is that of its ranks there."""
        if not isinstance(record, End) or record.rank is not None:
            return (record,)
        mine = [rank for rank, member in self.members.items() if member.node == node]
        return [msgspec.structs.replace(record, rank=rank) for rank in mine]

    def _as_ours(self, record: JobRecord) -> Record:
        if record.job_id == self.id:
            return record
        return msgspec.structs.replace(record, **self.id.fields())

    # --- judging ---

    def _begin_to_judge(self) -> None:
        self.detection = Detection(self._kinds, self._anomalies)
        for member in self.members.values():
            self._merger.add(self._as_ours(member.seen))

    def advance(self, known_until: float | None) -> list[Change]:
        """Judge what is known of all nodes until then; None: one is away, and time stands still.

        Its ranks would look as if they hung. What has changed of what is the fleet's to raise.
        """
        detection = self.detection
        if detection is None or known_until is None:
            self._skip = True
            return []
        if self._skip:
            self._skip = False
            detection.skip_to(known_until)
        changes = [c for one in self._merger.until(known_until) for c in detection.feed(one)]
        if known_until > self._time:
            self._time = known_until
            changes += detection.feed(Clock(known_until))
        return [change for change in changes if change.anomaly.kind in FLEET_KINDS]

    def anomalies(self, names: Mapping[str, str]) -> Iterator[Anomaly]:
        """Those that are the fleet's to raise, with the node of their rank. names: of nodes."""
        if self.detection is None:
            return
        for anomaly in (*self.detection.history, *self.detection.active):
            if anomaly.kind in FLEET_KINDS:
                yield self.located(anomaly, names)

    def located(self, anomaly: Anomaly, names: Mapping[str, str]) -> Anomaly:
        """With the node of its rank."""
        member = self.members.get(-1 if anomaly.rank is None else anomaly.rank)
        node = "" if member is None else names.get(member.node, member.node)
        where = f" (on {node})" if node else ""
        return replace(anomaly, summary=anomaly.summary + where, node=node, judged_by="fleet")

    # --- what is shown ---

    def ranks(self, names: Mapping[str, str]) -> list[RankState]:
        return [
            member.state(self.id, names.get(member.node, member.node))
            for _, member in sorted(self.members.items())
        ]

    def state(self) -> JobState:
        return JobState(
            name=self.id.name,
            owner=self.id.owner,
            run=self.id.run,
            world_size=self.world_size,
            ranks=tuple(str(rank) for rank in sorted(self.members)),
        )
