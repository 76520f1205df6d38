"""The engine: a line of stages from records to changes of anomalies, for daemon, fleet and replay.

It has no clock: deadlines are due in the records' own time, before the first record after them.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from warpwatch_detection.anomalies import core_contention
from warpwatch_detection.anomalies.register import AnomalyRegister, Change, RegisterState
from warpwatch_detection.anomalies.snapshot import ENGINE, Stateful
from warpwatch_detection.anomalies.tracked import Suppressed
from warpwatch_detection.config import AnomaliesConfig, DetectionConfig
from warpwatch_detection.detector import NEVER, DetectorRunner, DetectorStatus, KindResults
from warpwatch_detection.detectors import build
from warpwatch_detection.job_steps import JobSteps
from warpwatch_detection.ranks import Exit, JobLimit, LiveRank, RankDevices, RankId, as_exit
from warpwatch_telemetry.anomalies import Anomaly
from warpwatch_telemetry.errors import Refused
from warpwatch_telemetry.jobs import JobId
from warpwatch_telemetry.records import DeviceReading, End, RankEvent, RankSeen, Record, Serve, Step
from warpwatch_telemetry.state import Sensitivity

# Rings are read at once, and live ranks have a heartbeat every second. Only the ring of a pod that
# the kubelet does not list yet is read 15 s after the restart.
CONFIRM_S = 20.0


@dataclass(slots=True)
class EngineState:
    """The state of the engine without that of its detectors. time: the newest record's."""

    time: float = float("-inf")
    ranks: RankDevices = field(default_factory=RankDevices)
    register: RegisterState = field(default_factory=RegisterState)


class Detection:
    """The detectors of a process. ``feed`` takes records in order of time. Not thread-safe."""

    state_version, state_form = 1, EngineState

    def __init__(
        self, kinds: DetectionConfig | None = None, anomalies: AnomaliesConfig | None = None
    ) -> None:
        kinds, anomalies = kinds or DetectionConfig(), anomalies or AnomaliesConfig()
        self._ranks = RankDevices()
        self._limit = JobLimit()
        self._job_steps = JobSteps()
        self.runner = DetectorRunner(build(kinds, anomalies, self._ranks))
        self.register = AnomalyRegister(anomalies, self._ranks)
        self._time = -NEVER
        self._resumption: Resumption | None = None

    # --- the present state ---

    @property
    def active(self) -> tuple[Anomaly, ...]:
        return self.register.active

    @property
    def history(self) -> deque[Anomaly]:
        """The closed anomalies, newest last."""
        return self.register.history

    @property
    def suppressed(self) -> tuple[Suppressed, ...]:
        """The present findings that an active anomaly explains."""
        return tuple(self.register.state.suppressed.values())

    @property
    def refused(self) -> dict[str, int]:
        """The number of anomalies not opened, and of jobs refused or forgotten before their end."""
        return {"anomalies": self.register.refused, "jobs": self._limit.dropped}

    def statuses(self) -> dict[str, list[DetectorStatus]]:
        return {detector.kind: list(detector.statuses()) for detector in self.runner.detectors}

    def sensitivities(self) -> tuple[Sensitivity, ...]:
        """Return each kind's sensitivity in each job; a blind rank makes the job blind."""
        found: dict[tuple[str, str, str], Sensitivity] = {}
        for kind, statuses in self.statuses().items():
            for one in statuses:
                if one.job is None or (one.sees is None and not one.blind):
                    continue
                key = (kind, one.job, one.owner)
                known = found.get(key)
                if known is None or (one.blind and not known.blind):
                    found[key] = Sensitivity(*key, one.blind, one.text)
        return tuple(found.values())

    def pop_failure(self) -> Exception | None:
        """Return the first error that a detector raised since the last call."""
        return self.runner.pop_failure()

    # --- the line ---

    def feed(self, record: Record) -> list[Change]:
        """Return the changes that the record, and the time until it, cause."""
        time, resumption = record.time, self._resumption
        changes: list[Change] = []
        if resumption is not None:
            changes += self._end_missing(time, resumption)
        if self.runner.is_due(time) or self.register.deadline <= time:
            changes += self._expire(time)
        if resumption is not None and resumption.knew(record):
            return changes
        if time > self._time:
            self._time = time
        # A rank's durations are claims; after this check no detector has to doubt them.
        if _is_plausible(record):
            changes += self._process(record)
        return changes

    def _expire(self, until: float) -> list[Change]:
        """Process the deadlines of detectors and events until then, in their order."""
        put_off = self._resumption.put_off if self._resumption else float
        changes: list[Change] = []
        while True:
            now = min(self.runner.deadline(put_off), self.register.deadline)
            if now > until or now == NEVER:
                return changes
            changes += self.register.expire(now)
            changes += self.register.apply(self.runner.expire(now, put_off))

    def _process(self, record: Record) -> list[Change]:
        """Send a record down the line: ranks, joined steps, detectors, register."""
        changes: list[Change] = []
        if isinstance(record, (Step, RankSeen)) and not self._ranks.add(record):
            job = self._limit.victim(self._ranks, record)
            if job is None:
                return changes
            changes += self._forget(job, record.time)
            self._ranks.add(record)
        elif isinstance(record, Serve) and record.job_id not in self._ranks.jobs:
            # Its job is one too many, or no rank of it was reported yet.
            return changes
        elif isinstance(record, DeviceReading):
            self._ranks.index(record)
        elif isinstance(record, RankEvent):
            core_contention.observe(self.register.state.cores, record, self._ranks)
        joined = self._job_steps.observe(record)
        results = self.runner.observe(record)
        if joined is not None:
            results += self.runner.observe(joined)
        if type(record) is not Step and (exit := as_exit(record)):
            changes += self._end(exit, results)
        elif results:
            changes += self.register.apply(results)
        return changes

    def _end(self, exit: Exit, results: KindResults) -> list[Change]:
        """Apply the results of an exit, and end a job without ranks."""
        changes: list[Change] = []
        if self._ranks.ends_with(exit):
            # Otherwise a detector would clear what ends with the job.
            changes += self.register.end_job(exit.job_id, exit.time)
        changes += self.register.apply(results)
        core_contention.forget(self.register.state.cores, exit.job_id, exit.rank)
        if self._ranks.leave(exit):
            changes += self._forget(exit.job_id, exit.time)
        return changes

    def _forget(self, job: JobId, time: float) -> list[Change]:
        """End the anomalies of a job without ranks, and forget it."""
        changes = self.register.end_job(job, time)
        self._ranks.jobs.pop(job, None)
        core_contention.forget(self.register.state.cores, job)
        self._job_steps.forget(job)
        self.runner.forget(job)
        return changes

    # --- restarts of the daemon ---

    def parts(self) -> dict[str, Stateful]:
        """Return all parts with a state, the engine first; detectors by their kind."""
        detectors = {one.kind: one for one in self.runner.detectors}
        return {ENGINE: self, "job_steps": self._job_steps, **detectors}

    @property
    def state(self) -> EngineState:
        return EngineState(self._time, self._ranks, self.register.state)

    @state.setter
    def state(self, state: EngineState) -> None:
        self._time = state.time
        self._ranks.restore(state.ranks)
        self.register.restore(state.register)

    def resume(self, now: float, fresh: set[str], confirm_s: float = CONFIRM_S) -> list[Change]:
        """Go on after ``state`` was set: the daemon was away until ``now`` (wall clock, seconds).

        confirm_s: the time until all live ranks have reported; no deadline passes before.
        fresh: the kinds whose detectors have lost their state. They do not know when their faults
        are over, so these end here, as do those of kinds that are no longer evaluated. A fault that
        is found again soon is the same anomaly.
        """
        self._resumption = Resumption(now, self._time, self._ranks.jobs, confirm_s)
        kinds = {detector.kind for detector in self.runner.detectors} - fresh
        why = ", judged from the start since the daemon was restarted"
        return self.register.end_other_kinds(kinds, self._time, why)

    def skip_to(self, now: float) -> None:
        """Let no time pass although the clock leapt to ``now`` since the newest record."""
        if self._resumption is None:
            self._resumption = Resumption(now, self._time, {})
        else:
            self._resumption.skip(now, self._time)

    def resolve(self, ident: str, now: float, who: str) -> list[Change]:
        """End an anomaly that only service ends; the summary names ``who`` did it.

        Raises Refused if there is no such anomaly, or if it ends by itself.
        """
        anomaly = next((one for one in self.active if one.id == ident), None)
        if anomaly is None:
            raise Refused("not_found", "there is no such active anomaly")
        detector = next(one for one in self.runner.detectors if one.kind == anomaly.kind)
        cleared = detector.resolve(anomaly.device, now) if anomaly.device else None
        if cleared is None:
            raise Refused("ends_by_itself", f"{anomaly.kind} ends when it is over, not by hand")
        return self.register.apply([(anomaly.kind, cleared)], f", resolved by {who}")

    def _end_missing(self, time: float, resumption: Resumption) -> list[Change]:
        """End the ranks that have not reported since the restart: they ended before it."""
        changes: list[Change] = []
        if time >= resumption.heard_time:
            missing, resumption.missing = resumption.missing, set()
            for job, rank in sorted(missing):
                changes += self._process(End(time, rank=rank, **job.fields()))
        if time > resumption.over_time:
            self._resumption = None
        return changes


def _is_plausible(record: Record) -> bool:
    if isinstance(record, Serve):
        sums = (record.first_token_s, record.inter_token_s, record.queue_s, record.comm_s)
        seconds = (s for _, s in record.iterations.values())
        return 0.0 <= sum((*sums, *seconds, record.interval_s, record.idle_s)) < NEVER
    return type(record) is not Step or 0.0 <= record.duration_s < NEVER


class Resumption:
    """The first moments after a restart of the daemon, or a leap of the clock.

    Records from before the restart are read again (the rendezvous rewinds). Deadlines may have
    passed meanwhile: the time that was left when the daemon stopped starts to run at ``now``, the
    time of the restart. before: the time of the newest record that was read before it. missing:
    the ranks that lived before and have not reported since.
    """

    def __init__(
        self,
        now: float,
        before: float,
        jobs: Mapping[JobId, Mapping[int, LiveRank]],
        confirm_s: float = CONFIRM_S,
    ) -> None:
        self._confirm_s = confirm_s
        # The times at the restart: the ranks themselves go on.
        self._known = {
            (job, number): (rank.seen_time, rank.step_time)
            for job, ranks in jobs.items()
            for number, rank in ranks.items()
        }
        self.missing: set[RankId] = set(self._known)
        self._away_s = 0.0
        self.skip(now, before)

    def skip(self, now: float, before: float) -> None:
        """Let no time pass between ``before`` and ``now`` either."""
        self._now = now
        if math.isfinite(before):
            self._away_s += max(0.0, now - before)
        # All live ranks have reported by then.
        self.heard_time = now + self._confirm_s
        self.over_time = now + max(self._confirm_s, self._away_s)

    def put_off(self, deadline: float) -> float:
        """Return when a deadline is due: the time away does not count, and all rings are read."""
        if deadline <= self._now:
            deadline += self._away_s
        return max(self.heard_time, deadline)

    def knew(self, record: Record) -> bool:
        """Return whether the record was read before the restart; its rank lives in any case."""
        if not isinstance(record, Step | RankSeen):
            return False
        name = (record.job_id, record.rank)
        self.missing.discard(name)
        known = self._known.get(name)
        if known is None:
            return False
        seen_time, step_time = known
        return record.time <= (step_time if isinstance(record, Step) else seen_time)
