"""The nodes of all agents, and the jobs over them. No I/O, and no clock."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace

from warpwatch_detection.anomalies.register import Change
from warpwatch_detection.anomalies.tracked import Suppressed
from warpwatch_detection.config import AnomaliesConfig, DetectionConfig
from warpwatch_detection.detector import DetectorStatus
from warpwatch_fleet.jobs import FleetJob, ident_of
from warpwatch_fleet.memory import SAVE_INTERVAL_S, SavedJob
from warpwatch_fleet.node import REPORTS_AWAITED_S, Node, NodeNames
from warpwatch_fleet.targets import Target
from warpwatch_telemetry.anomalies import DEVICE_KINDS, Anomaly
from warpwatch_telemetry.bus_messages import partition_of
from warpwatch_telemetry.jobs import JobId
from warpwatch_telemetry.records import End, JobRecord, RankSeen
from warpwatch_telemetry.samples import NOT_ASKED

logger = logging.getLogger(__name__)

# If a node is further behind, it counts as unreachable, and jobs on it are not evaluated.
LATE_S = 10.0
# Ended jobs are shown for this time.
KEPT_S = 600.0
# Two of three may be lost.
LEASE_INTERVAL_S = 20.0
MAX_JOBS = 4096
# Records of all jobs that wait for their evaluation: a gigabyte at most.
MAX_WAITING = 1_000_000
# All jobs are saved once in this many rounds; SAVE_INTERVAL_S has more rounds.
MIN_SAVE_ROUNDS = 400


class Cluster:
    """All nodes and jobs that this process evaluates. Callers hold ``lock``.

    ``now``: wall clock, in seconds. ``partition``: the jobs that are meant; None for all.
    """

    def __init__(
        self,
        kinds: DetectionConfig,
        anomalies: AnomaliesConfig,
        saved: Mapping[JobId, SavedJob] | None = None,
    ) -> None:
        # The loop that follows agents holds it for long, other threads for a moment.
        self.lock = threading.Lock()
        # The state that an earlier process has left, by the job's name on a node.
        self.saved = dict(saved or {})
        # Jobs that are not kept any more, for who keeps them over a restart.
        self.forgotten: list[JobId] = []
        self._kinds = kinds
        self._anomalies = anomalies
        # By address, as all that names a node here.
        self.nodes: dict[str, Node] = {}
        self.jobs: dict[JobId, FleetJob] = {}
        self._by_partition: dict[int, dict[JobId, FleetJob]] = {}
        self.node_names = NodeNames()
        self._job_of: dict[tuple[str, JobId], FleetJob] = {}
        # By owner and base name.
        self._by_name: dict[tuple[str, str], list[FleetJob]] = {}
        self.refused: Counter[str] = Counter()
        # While old lines are read again, which begin in the middle of jobs.
        self.is_catching_up = False
        # By id, changes that are not committed yet: nobody else may see them.
        self.uncommitted: dict[str, str] = {}
        # Anomalies that the fleet has found, of the newest runs, by kind.
        self.raised: dict[JobId, Counter[str]] = {}

    # --- nodes ---

    def set_targets(self, targets: Mapping[str, Target]) -> None:
        """Add and remove nodes. The ranks of removed nodes stay as they are."""
        for address in self.nodes.keys() - targets.keys():
            self.remove_node(address)
        for address, target in targets.items():
            node = self.nodes.get(address)
            if node is None or node.target.owner != target.owner:
                if node is not None:
                    self.remove_node(address)
                self.nodes[address] = Node(target, self.node_names)

    def add_node(self, target: Target) -> Node:
        """Add an agent that has published on the bus. Raises AgentError for an invalid name."""
        node = Node(target)
        # Names that it has only for its records of jobs are not those of nodes.
        of_node = target.partition is None and target.owner is None
        names = self.node_names if of_node else NodeNames()
        names.claim(node.target.node or "", node)
        self.nodes[target.address] = node
        return node

    def remove_node(self, address: str) -> None:
        node = self.nodes.pop(address)
        self.node_names.release(node)
        self.refused += node.refused

    def end_ranks(self, address: str, now: float) -> None:
        """End the live ranks of an agent that does not come back."""
        for job in self.jobs.values():
            for rank, node in job.live_ranks().items():
                if node == address:
                    job.feed(address, End(now, rank=rank, **job.nodes[address].fields()))

    def agents(self) -> Iterator[Node]:
        """Yield each agent once: on the bus, its records of jobs are apart."""
        return (node for node in self.nodes.values() if node.target.partition is None)

    def names(self) -> dict[str, str]:
        """Return the names of nodes by address."""
        return {address: node.name for address, node in self.nodes.items()}

    # --- what they say ---

    def feed(self, address: str, lines: Iterable[bytes], now: float) -> None:
        """Apply lines of the agent at ``address``. Raises AgentError to stop following it."""
        node = self.nodes.get(address)
        if node is None:
            return
        for line in lines:
            for record in node.feed(line, now):
                try:
                    self._apply(address, record)
                except Exception:
                    # A bad record is dropped alone.
                    logger.exception("%s: a record is ignored", address)
                    self.refused["error"] += 1

    def _apply(self, address: str, record: JobRecord) -> None:
        if isinstance(record, RankSeen):
            self._join(address, record)
        elif job := self._job_of.get((address, record.job_id)):
            job.feed(address, record)
        elif not self.is_catching_up:
            self.refused["unknown_rank"] += 1

    def _join(self, address: str, seen: RankSeen) -> None:
        self._move(address, seen)
        job = self._job_of.get((address, seen.job_id)) or self._joined(address, seen)
        if job is None or not job.join(address, seen):
            self.refused["too_many_jobs" if job is None else "second_process"] += 1
            self.nodes[address].forget_rank(seen)
            return
        self._job_of[address, seen.job_id] = job
        if job.id != seen.job_id:
            self.nodes[address].join_run(seen.job_id, job.id)

    def _move(self, address: str, seen: RankSeen) -> None:
        """Move a live rank here from an address that has no agent any more.

        A new pod of an agent has a new address, while the ranks on its node go on.
        """
        for job in self._by_name.get((seen.owner, seen.job_id.base_name), ()):
            member = job.members.get(seen.rank)
            if member is None or not member.is_live or member.node == address:
                continue
            before = member.node
            if job.nodes.get(before) == seen.job_id and self._is_replaced(before, address):
                if job.move(member, address):
                    self._job_of.pop((before, seen.job_id), None)
                self._job_of[address, seen.job_id] = job

    def _is_replaced(self, before: str, address: str) -> bool:
        """Return whether an agent was removed, or is away while another one has its name."""
        node = self.nodes.get(before)
        return node is None or (not node.up and node.name == self.nodes[address].name)

    def _joined(self, address: str, seen: RankSeen) -> FleetJob | None:
        name = (seen.owner, seen.job_id.base_name)
        named = self._by_name.get(name, [])
        job = _find_job(seen, address, named)
        if job is None and (len(self.jobs) < MAX_JOBS or self._make_room(seen.owner)):
            saved = self.saved.get(seen.job_id)
            if saved is not None:
                # Once only: the run may end, and start again without what was found before.
                self.saved = {one: job for one, job in self.saved.items() if job.id != saved.id}
                saved = None if saved.id in self.jobs else saved
            ident = saved.id if saved else _new_id(seen, [one.id for one in named])
            job = self.jobs[ident] = FleetJob(ident, seen, self._kinds, self._anomalies, saved)
            self._by_partition.setdefault(partition_of(ident), {})[ident] = job
            self._by_name.setdefault(name, []).append(job)
        return job

    def _make_room(self, owner: str) -> bool:
        """Forget the newest job of the owner who has most, if that leaves no owner with less."""
        counts = Counter(job.owner for job in self.jobs)
        (most, count) = counts.most_common(1)[0]
        if count <= counts[owner] + 1:
            return False
        self.refused["too_many_jobs"] += 1
        self._remove(next(self.jobs[job] for job in reversed(self.jobs) if job.owner == most))
        return True

    # --- judging ---

    def drop_waiting(self) -> None:
        """Drop the waiting records of the jobs that have the most."""
        waiting = [job.waiting for job in self.jobs.values()]
        while sum(map(len, waiting)) > MAX_WAITING:
            max(waiting, key=len).clear()

    def is_heard(self) -> bool:
        """Return whether each agent has reported its ranks, or cannot be reached."""
        reasons = {node.reason for node in self.nodes.values()}
        return bool(reasons) and NOT_ASKED not in reasons

    def jobs_of(self, partition: int | None) -> Mapping[JobId, FleetJob]:
        return self.jobs if partition is None else self._by_partition.get(partition, {})

    def evaluate(self, now: float, partition: int | None = None) -> list[Change]:
        """Return the changes of the fleet's own anomalies, with their nodes."""
        found: list[tuple[FleetJob, Change]] = []
        for job in list(self.jobs_of(partition).values()):
            awaits = self._awaits_ranks(job, now)
            live = job.live_nodes()
            if job.is_evaluated:
                changes = job.advance(None if awaits else self._known_until(live, now))
                found += ((job, change) for change in changes if self._is_ours(job, change))
            if live:
                job.ended_at = None
            else:
                self._forget(job, now)
        if not found:
            return []
        names, faults = self.names(), self._device_faults()
        return [
            replace(change, anomaly=self._on_gpu(job, job.located(change.anomaly, names, faults)))
            for job, change in found
        ]

    def _awaits_ranks(self, job: FleetJob, now: float) -> bool:
        """Return whether agents are yet to report ranks again; end the ranks that are overdue."""
        awaited = {
            address: node
            for address in job.nodes
            if (node := self.nodes.get(address)) and node.unreported
        }
        awaits = False
        for rank, address in job.live_ranks().items() if awaited else ():
            node, known = awaited.get(address), job.nodes[address]
            if node is None or (*known, rank) not in node.unreported:
                continue
            if now - node.gap_at < REPORTS_AWAITED_S:
                awaits = True
            else:
                job.feed(address, End(now, rank=rank, **known.fields()))
        return awaits

    def _is_ours(self, job: FleetJob, change: Change) -> bool:
        """Return whether the fleet opens the anomaly, and count it."""
        kind, ident = change.anomaly.kind, change.anomaly.id
        if change.what == "opened" and self._raised_by_agents(job, change.anomaly):
            job.left.add(ident)
        elif change.what == "opened":
            self.raised.setdefault(job.id, Counter())[kind] += 1
            if len(self.raised) > MAX_JOBS:
                del self.raised[next(iter(self.raised))]
        return ident not in job.left

    def _raised_by_agents(self, job: FleetJob, found: Anomaly) -> bool:
        """Return whether an agent has opened this before the fleet evaluated the job."""
        # An agent closes anomalies of an earlier fleet with the first lease.
        of_fleet = ident_of(job.id, found).removeprefix(found.id)
        return any(
            node.has_active(found, name, of_fleet)
            for address, name in job.nodes.items()
            if (node := self.nodes.get(address))
        )

    def to_save(
        self, now: float, changed: Collection[JobId | None], partition: int | None = None
    ) -> list[SavedJob]:
        """Return the state of the jobs that have changed, and of a few that are due."""
        evaluated = [job for job in self.jobs_of(partition).values() if job.is_evaluated]
        due = [job for job in evaluated if now - job.saved_at > SAVE_INTERVAL_S]
        wanted = {job.id: job for job in due[: 1 + len(evaluated) // MIN_SAVE_ROUNDS]}
        wanted |= {job.id: job for job in evaluated if job.id in changed}
        for job in wanted.values():
            job.saved_at = now
        return [saved for job in wanted.values() if (saved := job.saved())]

    def _known_until(self, live: Iterable[str], now: float) -> float | None:
        """Return until when all nodes of a job have reported; None while one is away."""
        clocks = []
        for address in live:
            node = self.nodes.get(address)
            if node is None or not node.up or now - node.clock > LATE_S:
                return None
            clocks.append(node.clock)
        return min(clocks, default=now)

    def is_whole(self, job: FleetJob, now: float) -> bool:
        """Return whether the fleet receives all that it needs to evaluate the job."""
        known = job.is_evaluated and job.is_resumed
        return known and self._known_until(job.live_nodes(), now) is not None

    def leases_due(
        self, now: float, changed: Collection[JobId | None]
    ) -> list[tuple[Target, JobId, dict[str, str]]]:
        """Return the leases to renew: the agent, the job's name there, its active anomalies.

        Agents evaluate other jobs alone. changed: the jobs with a new anomaly.
        """
        due = []
        for job in self.jobs.values():
            is_due = now - job.leased_at >= LEASE_INTERVAL_S or job.id in changed
            if is_due and self.is_whole(job, now):
                job.leased_at = now
                raised = job.raised()
                due += [
                    (node.target, known, raised)
                    for address, known in job.nodes.items()
                    if (node := self.nodes.get(address))
                ]
        return due

    def _forget(self, job: FleetJob, now: float) -> None:
        """Remove the job if it has ended long ago."""
        job.ended_at = now if job.ended_at is None else job.ended_at
        if now - job.ended_at > KEPT_S:
            self._remove(job)

    def remove_partition(self, partition: int) -> None:
        """Remove the jobs that another process evaluates now."""
        for job in list(self.jobs_of(partition).values()):
            self._remove(job)
        self.forgotten = [one for one in self.forgotten if partition_of(one) != partition]
        self.saved = {one: job for one, job in self.saved.items() if partition_of(one) != partition}

    def _remove(self, job: FleetJob) -> None:
        del self.jobs[job.id], self._by_partition[partition_of(job.id)][job.id]
        self.forgotten.append(job.id)
        name = (job.id.owner, job.id.base_name)
        self._by_name[name].remove(job)
        if not self._by_name[name]:
            del self._by_name[name]
        for key in [(address, known) for address, known in job.nodes.items()]:
            if self._job_of.pop(key, None) and (node := self.nodes.get(key[0])):
                node.forget_ranks(key[1])

    # --- what is known ---

    def _device_faults(self) -> dict[str, list[Anomaly]]:
        """Return the anomalies of devices that agents have found, by the agent's address."""
        found = {
            address: [one for one in node.anomalies() if one.kind in DEVICE_KINDS]
            for address, node in self.nodes.items()
        }
        return {address: faults for address, faults in found.items() if faults}

    def anomalies(self) -> Iterator[Anomaly]:
        """Yield the fleet's own anomalies, and those of the agents."""
        names, faults = self.names(), self._device_faults()
        own: set[str] = set()
        for job in self.jobs.values():
            for anomaly in job.anomalies(names, faults):
                own.add(anomaly.id)
                change = self.uncommitted.get(anomaly.id)
                if change == "closed":
                    anomaly = replace(anomaly, end_time=None)
                if change in (None, "closed"):
                    yield self._on_gpu(job, anomaly)
        for node in self.nodes.values():
            for anomaly in node.anomalies():
                # An anomaly that an agent continues while there is no fleet has the fleet's id.
                # On the bus, a fault of a device is among its node's lines, too.
                again = node.target.partition is not None and anomaly.kind in DEVICE_KINDS
                if not again and anomaly.id.removesuffix(f"@{node.name}") not in own:
                    yield anomaly

    def _on_gpu(self, job: FleetJob, anomaly: Anomaly) -> Anomaly:
        """Return the anomaly with the index of its rank's GPU, if it is known."""
        member = job.members.get(-1 if anomaly.rank is None else anomaly.rank)
        node = self.nodes.get(member.node) if member else None
        sample = node.samples.get(anomaly.device or "") if node else None
        return replace(anomaly, gpu=sample.device.index) if sample else anomaly

    def detector_statuses(self) -> tuple[dict[str, list[DetectorStatus]], list[Suppressed]]:
        """Return the statuses of the fleet's detectors by kind, and suppressed anomalies."""
        statuses: dict[str, list[DetectorStatus]] = {}
        suppressed: list[Suppressed] = []
        for job in self.jobs.values():
            if job.detection is not None:
                for kind, readings in job.detection.statuses().items():
                    statuses.setdefault(kind, []).extend(readings)
                suppressed += job.detection.suppressed
        return statuses, suppressed

    def count_refused(self) -> Counter[str]:
        """Return the untrusted lines and ranks, by reason."""
        return sum((node.refused for node in self.nodes.values()), Counter(self.refused))


JOIN_S = 600.0


def _find_job(seen: RankSeen, node: str, jobs: Iterable[FleetJob]) -> FleetJob | None:
    """Return the job of a node's rank, or None for a new job.

    ``jobs``: the jobs of its owner and name.
    """
    for job in jobs:
        if seen.master or job.master:
            if _may_join(seen, node, job):
                return job
        elif job.id.run == seen.run:
            return job
    return None


def _may_join(seen: RankSeen, node: str, job: FleetJob) -> bool:
    others = {rank: member.node for rank, member in job.members.items()}
    return (
        job.master == seen.master
        and job.world_size == seen.world_size
        and others.get(seen.rank, node) == node
        and (node not in job.nodes or job.nodes[node].run == seen.run)
        and abs(seen.time - job.begin_time) <= JOIN_S
    )


def _new_id(seen: RankSeen, used: Iterable[JobId]) -> JobId:
    """Return the id of a new job."""
    same = {
        job for job in used if (job.owner, job.base_name) == (seen.owner, seen.job_id.base_name)
    }
    name = seen.job if same else seen.job_id.base_name
    return JobId(seen.owner, name, seen.run)
