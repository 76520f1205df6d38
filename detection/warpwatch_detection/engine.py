"""The engine: records through the detectors, verdicts into anomalies. Daemon and replay alike.

It has no clock: deadlines fall in the records' own time, before the first record after them.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

from warpwatch_detection.anomalies.rank_devices import LiveRank, RankDevices
from warpwatch_detection.anomalies.register import AnomalyRegister
from warpwatch_detection.anomalies.register_state import RegisterState, Suppressed
from warpwatch_detection.anomalies.resumption import Resumption
from warpwatch_detection.anomalies.snapshot import ENGINE, SnapshotPart
from warpwatch_detection.config import AnomaliesConfig, DetectionConfig
from warpwatch_detection.detector import NEVER, DetectorStatus
from warpwatch_detection.detector_runner import DetectorRunner
from warpwatch_detection.job_steps import JobSteps
from warpwatch_telemetry.anomalies import EVENT_KINDS, Anomaly
from warpwatch_telemetry.records import End, RankEvent, RankSeen, Record, Step

MAX_JOBS = 256
# A job that was silent for so long makes room for another, if there are too many.
SILENT_S = 600.0

# The form that the design gives an anomaly in logs and on the API.
JSON_FIELDS = (
    "time", "kind", "severity", "job", "rank", "device", "step", "begin_step", "value", "baseline",
    "summary",
)  # fmt: skip


@dataclass(slots=True)
class EngineState:
    """What the engine remembers besides its detectors. ``time``: of the newest record."""

    time: float = float("-inf")
    rank_devices: RankDevices = field(default_factory=RankDevices)
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
        self.job_steps = JobSteps()
        self._ranks = RankDevices()
        self._register = AnomalyRegister(anomalies, lambda: self._ranks)
        self._runner = DetectorRunner(kinds, anomalies, self._register)
        self._time = -NEVER
        self._resumption: Resumption | None = None
        self.jobs_forgotten = 0
        # Jobs that there was no room for, and until when there is none.
        self._jobs_refused: set[str] = set()
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
    def suppressed_counts(self) -> Counter[tuple[str, str]]:
        """How often a kind was not raised because another (the second) explained it."""
        return self._register.shadows.suppressed

    @property
    def suppressed(self) -> tuple[Suppressed, ...]:
        """What is found now and explained by an anomaly that is active."""
        return tuple(self._register.state.shadows.values())

    @property
    def failures(self) -> Counter[str]:
        """Observations that a detector could not take, by its kind."""
        return self._runner.failures

    @property
    def refused(self) -> dict[str, int]:
        """What was too much: anomalies not raised, jobs refused or forgotten before their end."""
        return {"anomalies": self._register.refused, "jobs": self.jobs_forgotten}

    def statuses(self) -> list[tuple[str, DetectorStatus]]:
        """How every detector sees what it judges, with its kind."""
        return [(kind, one) for kind, some in self.statuses_by_kind().items() for one in some]

    def statuses_by_kind(self) -> dict[str, list[DetectorStatus]]:
        """The same, also of detectors that have nothing to judge yet."""
        return {detector.kind: list(detector.statuses()) for detector in self._runner.detectors}

    # --- records ---

    def feed(self, record: Record) -> list[Anomaly]:
        """Anomalies that the record, or time up to it, opened, changed or closed.

        A closed one has an ``end_time``; an open one that was not there before is new, unless it
        was ``reopened``.
        """
        time = record.time
        changes: list[Anomaly] = []
        resumption = self._resumption
        if resumption is not None:
            self._settle(time, resumption, changes)
        if self._runner.due_time <= time:
            self._expire(time, changes)
        if resumption is not None and resumption.knew(record):
            return changes
        self._time = max(time, self._time)
        if type(record) is not Step:
            self._process(record, changes)
        elif 0.0 <= record.duration_s < NEVER:
            # What a rank says of itself is a claim; no detector need doubt it again.
            self._step(record, changes)
        return changes

    def _process(self, record: Record, changes: list[Anomaly]) -> None:
        """Any but a step."""
        if isinstance(record, RankSeen):
            life = self._join(record, changes)
            if life is None:
                return
            life.device = record.device or life.device
            life.seen_time = record.time
        self._runner.show(record, changes)
        self.job_steps.observe(record)
        if isinstance(record, (End, RankEvent)):
            self._leave(record, changes)

    def _step(self, record: Step, changes: list[Anomaly]) -> None:
        """One that lasted finitely long."""
        try:
            life = self._ranks.jobs[record.job][record.rank]
        except KeyError:
            joining = self._join(record, changes)
            if joining is None:
                return
            life = joining
        life.step_time = record.time
        self._runner.show(record, changes)
        joined = self.job_steps.step(record)
        if joined is not None:
            self._runner.show(joined, changes)

    def take_failure(self) -> Exception | None:
        """What a detector raised since the last call, the first of it."""
        return self._runner.take_failure()

    def _expire(self, until: float, changes: list[Anomaly]) -> None:
        """Deadlines up to this time."""
        put_off = self._resumption.put_off if self._resumption else float
        self._runner.expire(until, put_off, changes)

    # --- ranks and jobs ---

    def _join(self, record: Step | RankSeen, changes: list[Anomaly]) -> LiveRank | None:
        """None where there is no room for another job."""
        jobs = self._ranks.jobs
        if (
            record.job not in jobs
            and len(jobs) >= MAX_JOBS
            and not self._make_room(record, changes)
        ):
            return None
        return jobs.setdefault(record.job, {}).setdefault(record.rank, LiveRank())

    def _make_room(self, record: Step | RankSeen, changes: list[Anomaly]) -> bool:
        """Those that live stay: a job in the place of another would come back for a third's."""
        if record.time >= self._full_until:
            job, heard = self._ranks.longest_silent()
            if record.time >= heard + SILENT_S:
                self.jobs_forgotten += 1
                self._jobs_refused.discard(record.job)
                self._forget(job, record.time, changes)
                return True
            self._full_until = heard + SILENT_S
        if record.job not in self._jobs_refused and len(self._jobs_refused) < MAX_JOBS:
            self._jobs_refused.add(record.job)
            self.jobs_forgotten += 1
        return False

    def _leave(self, record: End | RankEvent, changes: list[Anomaly]) -> None:
        """Ranks that ended or died; the last one takes the job and its states with it."""
        if isinstance(record, RankEvent) and record.event != "died":
            return
        ranks = self._ranks.jobs.get(record.job)
        if ranks is None:
            return
        if record.rank is not None:
            self._ranks.leave(record.job, record.rank, record.time)
        if record.rank is None or not ranks:
            self._forget(record.job, record.time, changes)

    def _forget(self, job: str, time: float, changes: list[Anomaly]) -> None:
        self._register.end_job(job, time, changes)
        self._ranks.jobs.pop(job, None)
        self.job_steps.forget(job)
        self._runner.forget(job)

    # --- over a restart of the daemon ---

    def parts(self) -> dict[str, SnapshotPart]:
        """All that remembers something, the engine first; detectors by their kind."""
        return {
            ENGINE: SnapshotPart(self, versioned=False),
            "job_steps": SnapshotPart(self.job_steps),
            **{
                one.kind: SnapshotPart(one, getattr(self._kinds, one.kind))
                for one in self._runner.detectors
            },
        }

    @property
    def state(self) -> EngineState:
        return EngineState(self._time, self._ranks, self._register.state)

    @state.setter
    def state(self, state: EngineState) -> None:
        self._time = state.time
        self._ranks = state.rank_devices
        self._register.state = state.register

    def resume(self, now: float, anew: set[str]) -> list[Anomaly]:
        """After ``state`` was set: the daemon was away until ``now``, wall clock in seconds.

        anew: kinds whose detector could not be given its memory back. They cannot tell when what
        they found is over, so it ends here, and so does what is not judged any more; found again
        soon, it is the same anomaly.
        """
        lives = {
            (job, rank): life
            for job, ranks in self._ranks.jobs.items()
            for rank, life in ranks.items()
        }
        self._resumption = Resumption(now, self._time, lives)
        self._runner.look_up_dues()
        changes: list[Anomaly] = []
        judged = {detector.kind for detector in self._runner.detectors} - anew
        for key in list(self._register.shadows.known):
            if key[0] not in judged:
                self._register.shadows.forget(key)
        for key, known in list(self._register.state.active.items()):
            if key[0] not in judged and key[0] not in EVENT_KINDS:
                known.said += ", judged anew since the daemon was restarted"
                self._register.end_untold(key, self._time, changes)
        return changes

    def overlook(self, now: float) -> None:
        """The clock leapt to ``now`` since the newest record: no time has passed meanwhile."""
        if self._resumption is None:
            self._resumption = Resumption(now, self._time, {})
        else:
            self._resumption.skip(now, self._time)
        self._runner.look_up_dues()

    def _settle(self, time: float, resumption: Resumption, changes: list[Anomaly]) -> None:
        """Ranks that have not shown up since the restart have ended while nobody looked."""
        for job, rank in resumption.take_gone(time):
            self._process(End(time, job, rank), changes)
        if time > resumption.over_time:
            self._resumption = None
            self._runner.due_time = -NEVER


def anomaly_to_json(anomaly: Anomaly) -> dict[str, Any]:
    """The anomaly as the log, ``replay --json`` and the API show it; what is unknown is null."""
    return {name: getattr(anomaly, name) for name in JSON_FIELDS}
