"""The engine: records through the detectors, verdicts into anomalies. Daemon and replay alike.

It has no clock: deadlines fall in the records' own time, before the first record after them.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

from warpwatch_detection.anomalies import core_contention
from warpwatch_detection.anomalies.changes import Change
from warpwatch_detection.anomalies.rank_devices import LiveRank, RankDevices
from warpwatch_detection.anomalies.register import AnomalyRegister
from warpwatch_detection.anomalies.register_state import RegisterState, Suppressed
from warpwatch_detection.anomalies.resumption import Resumption
from warpwatch_detection.anomalies.snapshot import ENGINE, SnapshotPart
from warpwatch_detection.config import AnomaliesConfig, DetectionConfig
from warpwatch_detection.detector import NEVER, DetectorStatus
from warpwatch_detection.detector_runner import DetectorRunner
from warpwatch_detection.detectors import build
from warpwatch_detection.job_steps import JobSteps
from warpwatch_telemetry.anomalies import Anomaly
from warpwatch_telemetry.errors import Refused
from warpwatch_telemetry.jobs import JobId
from warpwatch_telemetry.records import DeviceReading, End, RankEvent, RankSeen, Record, Step
from warpwatch_telemetry.state import Sensitivity

MAX_JOBS = 256
# If there are too many jobs, one that was silent for so long makes room for another.
SILENT_S = 600.0


@dataclass(slots=True)
class EngineState:
    """What the engine remembers besides its detectors. ``time``: of the newest record."""

    time: float = float("-inf")
    ranks: RankDevices = field(default_factory=RankDevices)
    register: RegisterState = field(default_factory=RegisterState)


class Detection:
    """``feed`` every record in order of time. Not thread-safe: one owner feeds and reads."""

    def __init__(
        self,
        kinds: DetectionConfig | None = None,
        anomalies: AnomaliesConfig | None = None,
    ) -> None:
        kinds, anomalies = kinds or DetectionConfig(), anomalies or AnomaliesConfig()
        self._kinds = kinds
        self._job_steps = JobSteps()
        self._ranks = RankDevices()
        self._register = AnomalyRegister(anomalies, self._ranks)
        self._runner = DetectorRunner(build(kinds, anomalies), self._register)
        self._time = -NEVER
        self._resumption: Resumption | None = None
        self._jobs_forgotten = 0
        # Jobs that there was no room for, and until when there is none.
        self._jobs_refused: set[JobId] = set()
        self._full_until = -NEVER

    # --- what it knows ---

    @property
    def active(self) -> tuple[Anomaly, ...]:
        return self._register.active

    @property
    def history(self) -> deque[Anomaly]:
        """Those that ended, the newest last."""
        return self._register.history

    @property
    def suppressed(self) -> tuple[Suppressed, ...]:
        """What is found now and explained by an anomaly that is active."""
        return tuple(self._register.suppressed.known.values())

    @property
    def suppressed_counts(self) -> Counter[tuple[str, str]]:
        """How often a kind was not raised because another (the second) explained it."""
        return self._register.suppressed.counts

    @property
    def failures(self) -> Counter[str]:
        """Observations that a detector could not take, by its kind."""
        return self._runner.failures

    @property
    def refused(self) -> dict[str, int]:
        """What was too much: anomalies not raised, jobs refused or forgotten before their end."""
        return {"anomalies": self._register.refused, "jobs": self._jobs_forgotten}

    def statuses(self) -> dict[str, list[DetectorStatus]]:
        """How every detector sees what it judges, by kind."""
        return {detector.kind: list(detector.statuses()) for detector in self._runner.detectors}

    def sensitivities(self) -> tuple[Sensitivity, ...]:
        """Of each kind and job of which it is known; a rank that is hidden hides the job."""
        found: dict[tuple[str, str, str], Sensitivity] = {}
        for kind, some in self.statuses().items():
            for one in some:
                if one.job is None or (one.sees is None and not one.blind):
                    continue
                key = (kind, one.job, one.owner)
                known = found.get(key)
                if known is None or (one.blind and not known.blind):
                    found[key] = Sensitivity(*key, one.blind, one.text)
        return tuple(found.values())

    def pop_failure(self) -> Exception | None:
        """What a detector raised since the last call, the first of it."""
        return self._runner.pop_failure()

    # --- records ---

    def feed(self, record: Record) -> list[Change]:
        """What the record, or time up to it, does to anomalies."""
        time, resumption = record.time, self._resumption
        changes: list[Change] = []
        if resumption is not None:
            changes += self._settle(time, resumption)
        if self._runner.due_time <= time:
            put_off = self._resumption.put_off if self._resumption else float
            changes += self._runner.expire(time, put_off)
        if resumption is not None and resumption.knew(record):
            return changes
        if time > self._time:
            self._time = time
        if type(record) is not Step:
            changes += self._process(record)
        elif 0.0 <= record.duration_s < NEVER:
            # What a rank says of itself is a claim; after this no detector has to doubt it.
            changes += self._step(record)
        return changes

    def _process(self, record: Record) -> list[Change]:
        """Any but a step."""
        changes: list[Change] = []
        if isinstance(record, RankSeen):
            changes += self._join(record)
            rank = self._ranks.find(record.job_id, record.rank)
            if rank is None:
                return changes
            rank.device = record.device or rank.device
            rank.world_size = record.world_size
            rank.seen_time = record.time
        elif isinstance(record, DeviceReading):
            self._ranks.observe(record)
        elif isinstance(record, RankEvent) and self._ranks.find(record.job_id, record.rank):
            core_contention.observe(self._register.state.cores, record)
        leaver: End | RankEvent | None = record if isinstance(record, End) else None
        if isinstance(record, RankEvent) and record.event == "died":
            leaver = record
        if leaver and self._ranks.jobs.get(leaver.job_id, {}).keys() == {leaver.rank}:
            # Before a detector says of the last rank that nothing is wrong with it any more.
            changes += self._register.end_job(leaver.job_id, leaver.time)
        changes += self._runner.show(record)
        self._job_steps.observe(record)
        if leaver:
            changes += self._leave(leaver)
        return changes

    def _step(self, record: Step) -> list[Change]:
        """One that lasted finitely long."""
        changes: list[Change] = []
        rank = self._ranks.find(record.job_id, record.rank)
        if rank is None:
            changes += self._join(record)
            rank = self._ranks.find(record.job_id, record.rank)
            if rank is None:
                return changes
        rank.step_time, rank.step = record.time, record.step
        changes += self._runner.show(record)
        joined = self._job_steps.observe(record)
        if joined is not None:
            changes += self._runner.show(joined)
        return changes

    # --- ranks and jobs ---

    def _join(self, record: Step | RankSeen) -> list[Change]:
        """The rank is known from here on, unless there is no room for another job."""
        jobs, changes = self._ranks.jobs, []
        if record.job_id not in jobs and len(jobs) >= MAX_JOBS:
            changes = self._make_room(record)
        if record.job_id in jobs or len(jobs) < MAX_JOBS:
            jobs.setdefault(record.job_id, {}).setdefault(record.rank, LiveRank())
        return changes

    def _make_room(self, record: Step | RankSeen) -> list[Change]:
        """Of who has the most jobs one goes, for who has fewer; else only a silent one.

        A live one of the same owner would return and push out the next.
        """
        owners = Counter(job.owner for job in self._ranks.jobs)
        greediest, most = owners.most_common(1)[0]
        if owners[record.owner] + 1 < most:
            self._jobs_forgotten += 1
            return self._forget(self._ranks.longest_silent(greediest)[0], record.time)
        if record.time >= self._full_until:
            job, heard = self._ranks.longest_silent()
            if record.time >= heard + SILENT_S:
                self._jobs_forgotten += 1
                self._jobs_refused.discard(record.job_id)
                return self._forget(job, record.time)
            self._full_until = heard + SILENT_S
        if record.job_id not in self._jobs_refused and len(self._jobs_refused) < MAX_JOBS:
            self._jobs_refused.add(record.job_id)
            self._jobs_forgotten += 1
        return []

    def _leave(self, record: End | RankEvent) -> list[Change]:
        """Ranks that ended or died; the last one takes the job and its states with it."""
        ranks = self._ranks.jobs.get(record.job_id)
        if ranks is None:
            return []
        if record.rank is not None:
            self._ranks.leave(record.job_id, record.rank, record.time)
            self._register.state.cores.get(record.job_id, {}).pop(record.rank, None)
            if ranks:
                return []
        return self._forget(record.job_id, record.time)

    def _forget(self, job: JobId, time: float) -> list[Change]:
        changes = self._register.end_job(job, time)
        self._ranks.jobs.pop(job, None)
        self._register.state.cores.pop(job, None)
        self._job_steps.forget(job)
        self._runner.forget(job)
        return changes

    # --- over a restart of the daemon ---

    def parts(self) -> dict[str, SnapshotPart]:
        """All that remembers something, the engine first; detectors by their kind."""
        return {
            ENGINE: SnapshotPart(self),
            "job_steps": SnapshotPart(self._job_steps),
            **{one.kind: SnapshotPart(one, one.state_version) for one in self._runner.detectors},
        }

    @property
    def state(self) -> EngineState:
        return EngineState(self._time, self._ranks, self._register.state)

    @state.setter
    def state(self, state: EngineState) -> None:
        self._time = state.time
        self._ranks = self._register.ranks = state.ranks
        self._register.state = state.register

    def resume(self, now: float, fresh: set[str]) -> list[Change]:
        """After ``state`` was set: the daemon was away until ``now``, wall clock in seconds.

        fresh: kinds whose detector could not be given its state back. They cannot know when what
        they found is over, so it ends here, and so does what is not judged any more; found again
        soon, it is the same anomaly.
        """
        self._resumption = Resumption(now, self._time, self._ranks.live())
        self._runner.look_up_dues()
        judged = {detector.kind for detector in self._runner.detectors} - fresh
        why = ", judged from the start since the daemon was restarted"
        return self._register.end_unjudged(judged, self._time, why)

    def skip_to(self, now: float) -> None:
        """The clock leapt to ``now`` since the newest record: no time has passed meanwhile."""
        if self._resumption is None:
            self._resumption = Resumption(now, self._time, {})
        else:
            self._resumption.skip(now, self._time)
        self._runner.look_up_dues()

    def resolve(self, ident: str, now: float, who: str) -> list[Change]:
        """End an anomaly that only service ends. ``who`` did it: for the summary.

        Raises Refused if there is no such anomaly, or if it ends by itself.
        """
        anomaly = next((one for one in self.active if one.id == ident), None)
        if anomaly is None:
            raise Refused("not_found", "there is no such active anomaly")
        detector = next(one for one in self._runner.detectors if one.kind == anomaly.kind)
        fine = detector.resolve(anomaly.device, now) if anomaly.device else None
        if fine is None:
            raise Refused("ends_by_itself", f"{anomaly.kind} ends when it is over, not by hand")
        return self._register.take(anomaly.kind, [fine], f", resolved by {who}")

    def _settle(self, time: float, resumption: Resumption) -> list[Change]:
        """Ranks that have not shown up since the restart ended while the daemon was away."""
        changes: list[Change] = []
        for job, rank in resumption.take_gone(time):
            changes += self._process(End(time, rank=rank, **job.fields()))
        if time > resumption.over_time:
            self._resumption = None
            self._runner.due_time = -NEVER
        return changes
