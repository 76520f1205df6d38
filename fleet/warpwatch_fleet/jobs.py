"""The ranks of a job over its nodes, and the detectors that see them all."""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import msgspec

from warpwatch_detection.anomalies import snapshot
from warpwatch_detection.anomalies.explanation import DEVICE_CAUSES, NETWORK_CAUSES
from warpwatch_detection.anomalies.register import Change
from warpwatch_detection.config import AnomaliesConfig, DetectionConfig
from warpwatch_detection.engine import Detection, EngineState
from warpwatch_fleet.memory import SavedJob
from warpwatch_fleet.merging import RecordMerger
from warpwatch_fleet.node import REPORTS_AWAITED_S
from warpwatch_telemetry.anomalies import FLEET_KINDS, Anomaly
from warpwatch_telemetry.jobs import JobId
from warpwatch_telemetry.records import (
    Clock,
    End,
    JobRecord,
    RankEvent,
    RankSeen,
    Record,
    Serve,
    Step,
)
from warpwatch_telemetry.state import JobState, RankState, RecentSteps, ServeState, StepDurations

# By address, what agents have found of their devices.
Faults = Mapping[str, Iterable[Anomaly]]
# A fault that closed up to this time before may be the cause.
CAUSE_S = 60.0
MAX_EVIDENCE = 4
# Anomalies that have ended, which a restart remembers.
MAX_SAVED_HISTORY = 100


_RANK = re.compile(r"\brank (\d{1,7})\b")


class FleetJob:
    """A job of the fleet. nodes: its name by address. is_evaluated: whether the fleet evaluates it.

    waiting: records that are not evaluated yet. left: ids of anomalies that an agent had opened
    first, and keeps. saved_at, leased_at: wall clock of the last save, and of the last lease.

    A job of one node is its agent's: the fleet evaluates only jobs on several nodes.
    """

    def __init__(
        self,
        job: JobId,
        seen: RankSeen,
        kinds: DetectionConfig,
        anomalies: AnomaliesConfig,
        saved: SavedJob | None = None,
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
        self.waiting = RecordMerger()
        self._time = -math.inf
        self._skip = False
        self._saved = saved
        self._awaited_until: float | None = None
        self.left = set() if saved is None else set(saved.left)
        self.saved_at = self.leased_at = -math.inf
        self.detection: Detection | None = None

    @property
    def is_evaluated(self) -> bool:
        return self.detection is not None

    @property
    def is_resumed(self) -> bool:
        """Whether all is known that the fleet before this one knew."""
        return self._saved is None

    def names(self) -> set[JobId]:
        """Return the names of the job here and on its nodes."""
        return {self.id, *self.nodes.values()}

    def live_ranks(self) -> dict[int, str]:
        """Return the node of each live rank, by its address."""
        return {rank: member.node for rank, member in self.members.items() if member.is_live}

    def computing_ranks(self) -> dict[int, str]:
        """Return the live ranks with steps: all but the scheduler and front end of a server."""
        return {
            rank: node
            for rank, node in self.live_ranks().items()
            if self.members[rank].seen.role == "rank"
        }

    def live_nodes(self) -> set[str]:
        """Return the addresses of the nodes with a live rank."""
        return {member.node for member in self.members.values() if member.is_live}

    # --- what nodes say ---

    def join(self, node: str, seen: RankSeen) -> bool:
        """Add a rank on a node; return False if another node has this rank alive."""
        before = self.members.get(seen.rank)
        if before is not None and before.is_live and before.node != node:
            return False
        self.nodes[node] = seen.job_id
        if before is not None and before.node == node and _is_same(before.seen, seen):
            return True
        if before is None or before.node != node:
            self.members[seen.rank] = Member(node, seen)
        else:
            before.status = "running"
            before.began_time = max(before.began_time, seen.time)
            # Its process may be a new one, in another pod.
            device = seen.device or before.seen.device
            before.seen = msgspec.structs.replace(seen, device=device)
        # Scheduler and front end of a server come after its workers.
        serves = seen.kind == "serve"
        self.world_size = max(seen.world_size, self.world_size if serves else 0)
        self.waiting.ranks = len(self.members)
        if self.is_evaluated:
            self.waiting.add(self._as_ours(seen))
        elif len(self.nodes) > 1:
            self._start_evaluation()
        return True

    def move(self, member: Member, node: str) -> bool:
        """Move a rank to another address; return whether it was the last live one at its own."""
        left, member.node = member.node, node
        self.nodes[node] = self.nodes[left]
        if left in self.live_nodes():
            return False
        del self.nodes[left]
        return True

    def feed(self, node: str, record: Step | Serve | RankEvent | End) -> None:
        for one in self._of_ranks(record):
            member = self.members.get(one.rank if one.rank is not None else -1)
            if member is None or member.node != node:
                continue
            if isinstance(one, Step):
                if member.has_counted(one):
                    continue
                one = member.in_order(one)
            member.feed(one)
            # After a restart, all lines of a node may come before those of the next one.
            if self.is_evaluated or not self.is_resumed:
                self.waiting.add(self._as_ours(one))

    def _of_ranks(
        self, record: Step | Serve | RankEvent | End
    ) -> Iterable[Step | Serve | RankEvent | End]:
        """Return the record, or one per rank for the job's end on a node."""
        if not isinstance(record, End) or record.rank is not None:
            return (record,)
        return [msgspec.structs.replace(record, rank=rank) for rank in self.members]

    def _as_ours(self, record: JobRecord) -> Record:
        if record.job_id == self.id:
            return record
        return msgspec.structs.replace(record, **self.id.fields())

    # --- evaluation ---

    def _start_evaluation(self) -> None:
        self.detection = Detection(self._kinds, self._anomalies)
        for member in self.members.values():
            # The end of other ranks was not kept: they would look as if they lived on.
            if member.is_live:
                self.waiting.add(self._as_ours(member.seen))

    def advance(self, known_until: float | None) -> list[Change]:
        """Judge what is known of all nodes until then; None: one is away, and time stands still.

        Its ranks would look as if they hung. Return the changes of the fleet's own anomalies.
        """
        detection = self.detection
        if detection is None or known_until is None:
            self._skip = True
            return []
        saved = self._saved
        if saved is not None and (known_until < saved.time or self._awaits_ranks(known_until)):
            return []
        records: Iterable[Record] = self.waiting.until(known_until)
        changes: list[Change] = []
        if self._saved is not None:
            records = list(records)
            changes = self._resume(detection, self._saved, records, known_until)
            self._saved = None
            records = list(self._unread(detection.state, records))
        elif self._skip:
            detection.skip_to(known_until)
        self._skip = False
        changes += [change for one in records for change in detection.feed(one)]
        if known_until > self._time:
            self._time = known_until
            changes += detection.feed(Clock(known_until))
        return [change for change in changes if change.anomaly.kind in FLEET_KINDS]

    # --- over a restart of the fleet ---

    def _awaits_ranks(self, now: float) -> bool:
        """Return whether to wait for ranks of nodes that are not followed yet."""
        if self._awaited_until is None:
            self._awaited_until = now + REPORTS_AWAITED_S
        return len(self.members) < self.world_size and now < self._awaited_until

    def _resume(
        self, detection: Detection, saved: SavedJob, records: Iterable[Record], until: float
    ) -> list[Change]:
        """Go on as the fleet before this one. Time without records has not passed."""
        fresh = snapshot.restore(saved.detectors, detection.parts())
        detection.history.extend(saved.history)
        if snapshot.ENGINE in fresh:
            return []
        known_since = detection.state.time
        begun = min((one.time for one in records if one.time > known_since), default=until)
        # All ranks have reported already: a hang that spans several workers is found in time.
        return detection.resume(begun, fresh, confirm_s=0.0)

    def _unread(self, state: EngineState, records: Iterable[Record]) -> Iterator[Record]:
        """Yield the records that are not in the state, and each start of a rank.

        Times of records that are read again may differ by less than SAME_S: the clock of their
        node was compared anew.
        """
        ranks = state.ranks.jobs.get(self.id, {})
        for record in records:
            is_new = record.time > state.time
            if isinstance(record, RankSeen):
                rank = ranks.get(record.rank)
                if rank is not None and abs(rank.seen_time - record.time) < SAME_S:
                    record = msgspec.structs.replace(record, time=rank.seen_time)
                is_new = True
            elif isinstance(record, Step) and abs(record.time - state.time) < SAME_S:
                rank = ranks.get(record.rank)
                is_new = rank is None or record.step > rank.step
            if is_new:
                yield record

    def saved(self) -> SavedJob | None:
        """Return the state for a restart, or None for a job that is not evaluated (again)."""
        detection = self.detection
        if detection is None or self._saved is not None:
            return None
        detectors = snapshot.save(detection.parts())
        return SavedJob(
            self.id,
            tuple(self.nodes.values()),
            msgspec.msgpack.decode(detectors, type=snapshot.Snapshot),
            tuple(detection.history)[-MAX_SAVED_HISTORY:],
            detection.active,
            frozenset(self.left),
            detection.state.time,
        )

    # --- what it finds ---

    def anomalies(self, names: Mapping[str, str], faults: Faults) -> Iterator[Anomaly]:
        """Yield the fleet's own anomalies with the node of their rank. names: node names."""
        knows = self._saved or self.detection
        if knows is None:
            return
        for anomaly in (*knows.history, *knows.active):
            if anomaly.kind in FLEET_KINDS and anomaly.id not in self.left:
                yield self.located(anomaly, names, faults)

    def raised(self) -> dict[str, str]:
        """Return the ids of the fleet's own active anomalies, by kind."""
        found = self.anomalies({}, {})
        return {anomaly.kind: anomaly.id for anomaly in found if anomaly.end_time is None}

    def located(self, anomaly: Anomaly, names: Mapping[str, str], faults: Faults) -> Anomaly:
        """Return the anomaly with a unique id, its rank's node, and the faults of its rank's GPU.

        Its effects and evidence name their nodes too.
        """

        def node_of(rank: int | None) -> str:
            member = self.members.get(-1 if rank is None else rank)
            return "" if member is None else names.get(member.node, member.node)

        def placed(text: str) -> str:
            """Return the text with the node of its rank."""
            found = _RANK.search(text)
            where = node_of(int(found[1])) if found else ""
            return f"{text} (on {where})" if where else text

        node = node_of(anomaly.rank)
        cause = anomaly.summary.removesuffix("; ".join(("", *anomaly.evidence, *anomaly.effects)))
        causes = tuple(self._possible_causes(anomaly, faults))[:MAX_EVIDENCE] if faults else ()
        evidence = tuple(map(placed, (*anomaly.evidence, *causes)))
        effects = tuple(map(placed, anomaly.effects))
        return replace(
            anomaly,
            id=ident_of(self.id, anomaly),
            summary="; ".join((cause, *evidence, *effects)),
            evidence=evidence,
            effects=effects,
            node=node,
            judged_by="fleet",
        )

    def _possible_causes(self, anomaly: Anomaly, faults: Faults) -> Iterator[str]:
        """Yield faults of its ranks' GPUs and their nodes' network, which may be the cause."""
        kinds = DEVICE_CAUSES.get(anomaly.kind, ())
        of_network = NETWORK_CAUSES.get(anomaly.kind, ())
        end = math.inf if anomaly.end_time is None else anomaly.end_time
        nodes = set()
        for rank in self.members if anomaly.rank is None else (anomaly.rank,):
            member = self.members.get(rank)
            if member is None:
                continue
            for one in faults.get(member.node, ()):
                over = math.inf if one.end_time is None else one.end_time
                meets = one.time <= end and over >= anomaly.time - CAUSE_S
                if meets and one.kind in kinds and one.device == member.seen.device is not None:
                    yield f"{one.kind} on the GPU of rank {rank}: {one.summary}"
                elif meets and one.kind in of_network and member.node not in nodes:
                    yield f"{one.kind} on the node of rank {rank}: {one.summary}"
            nodes.add(member.node)

    # --- what is shown ---

    def ranks(self, names: Mapping[str, str], now: float) -> list[RankState]:
        return [
            member.state(self.id, names.get(member.node, member.node), now)
            for _, member in sorted(self.members.items())
        ]

    def step_s(self, now: float) -> float | None:
        """Return the newest step time of one live rank: all ranks of a job keep one pace."""
        live = next((member for member in self.members.values() if member.is_live), None)
        pace = live.recent.pace(now).get("steps_per_s") if live else None
        return 1.0 / pace if pace else None

    def state(self) -> JobState:
        return JobState(
            name=self.id.name,
            owner=self.id.owner,
            run=self.id.run,
            world_size=self.world_size,
            ranks=tuple(str(rank) for rank in sorted(self.members)),
            kind=next((member.seen.kind for member in self.members.values()), "train"),
            replica=next((member.seen.replica for member in self.members.values()), ""),
        )


def ident_of(job: JobId, anomaly: Anomaly) -> str:
    """Return the fleet's id of a job's anomaly.

    The job's own id has the second in which the anomaly was found and its number in the job. It
    follows from state and records alone: a process that continues from this state finds the same.
    """
    return f"{anomaly.id}-{zlib.crc32(repr(job).encode()):08x}"


# Two times of one process differ by less: the fleet's time follows the node's clock.
SAME_S = 2.0


def _is_same(before: RankSeen, seen: RankSeen) -> bool:
    """Return whether an agent repeats its report of a process."""
    near = abs(before.time - seen.time) < SAME_S
    return near and before == msgspec.structs.replace(seen, time=before.time)


@dataclass(slots=True)
class Member:
    """One rank of the job, on the node at this address.

    knows_requests: whether it has reported requests or the KV cache; others report 0 requests.
    began_time: when its newest process was seen first.
    """

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
    durations: StepDurations = field(default_factory=StepDurations)
    recent: RecentSteps = field(default_factory=RecentSteps)
    second: Serve | None = None
    knows_requests: bool = False
    began_time: float = -math.inf

    @property
    def is_live(self) -> bool:
        return self.status in ("running", "stopped")

    def has_counted(self, step: Step) -> bool:
        """Return whether the step is read again, of an agent that was no target for a while.

        The next step of the newest process is new at any time: its node's clock may be set back.
        """
        last = self.last_step_time
        if last is None or self.step is None or step.time >= last + SAME_S:
            return False
        if step.time <= last - SAME_S:
            return step.step != self.step + 1 or self.seen.time < self.began_time - SAME_S
        return step.step <= self.step

    def in_order(self, step: Step) -> Step:
        """Return the step at the time of the one before, if its own time is long before that."""
        last = self.last_step_time
        if last is None or step.time > last - SAME_S:
            return step
        return msgspec.structs.replace(step, time=last)

    def feed(self, record: JobRecord) -> None:
        if isinstance(record, Step):
            self._add_step(record)
        elif isinstance(record, Serve):
            self.second = record
            if record.kv_usage is not None or record.running or record.waiting:
                self.knows_requests = True
        elif isinstance(record, End):
            self.status = "exited"
        elif isinstance(record, RankEvent) and record.event in ("died", "stopped", "resumed"):
            self.status = "running" if record.event == "resumed" else record.event
            reason = record.detail.get("silent_reason")
            self.silent_reason = str(reason)[:32] if record.event == "stopped" else None
        elif isinstance(record, RankEvent) and record.event == "records_lost":
            # The agent could not read all steps; their ring counts them nevertheless.
            self.steps = max(self.steps, _count(record, "steps"))
            self.samples = max(self.samples, _count(record, "samples"))
            self.tokens = max(self.tokens, _count(record, "tokens"))

    def _add_step(self, step: Step) -> None:
        self.step, self.last_step_time = step.step, step.time
        self.steps += 1
        self.samples += step.samples
        self.tokens += step.tokens
        self.memory_allocated_bytes = step.memory_allocated_bytes
        for name, seconds in step.phases_s.items():
            if name in self.phases_s or len(self.phases_s) < 16:
                self.phases_s[name] = self.phases_s.get(name, 0.0) + seconds
        self.durations.add(step.duration_s)
        self.recent.add(step)

    def state(self, job: JobId, host: str, now: float) -> RankState:
        return RankState(
            rank=self.seen.rank,
            name=str(self.seen.rank),
            **job.fields(),
            pid=0,
            host=host,
            world_size=self.seen.world_size,
            device=self.seen.device,
            pod_uid=self.seen.pod_uid or None,
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
            durations=self.durations.histogram(),
            recent_s=tuple(self.recent),
            **(self.recent.pace(now) if self.is_live else {}),
            memory_allocated_bytes=self.memory_allocated_bytes,
            serve=self._serve() if self.seen.kind == "serve" else None,
        )

    def _serve(self) -> ServeState:
        """Return the server's process."""
        seen, second = self.seen, self.second if self.is_live else None
        return ServeState(seen.role, seen.replica, **ServeState.now(second, self.knows_requests))


def _count(event: RankEvent, name: str) -> int:
    count = event.detail.get(name)
    return count if type(count) is int else 0
