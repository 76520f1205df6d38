"""Verdicts into anomalies: opened once, updated, explained, closed, and continued if they return.

Pure and without a clock, as the detectors: times are those of the verdicts.
"""

from __future__ import annotations

from collections import deque
from dataclasses import asdict, replace
from typing import Literal

from warpwatch_detection.anomalies.causes import EXPLAINED_BY, LONG_EVIDENCE
from warpwatch_detection.anomalies.changes import Change
from warpwatch_detection.anomalies.core_contention import NONE, evidence
from warpwatch_detection.anomalies.explanation import cause_of
from warpwatch_detection.anomalies.rank_devices import RankDevices, with_job
from warpwatch_detection.anomalies.register_state import (
    EndedKey,
    Key,
    RegisterState,
    TrackedAnomaly,
)
from warpwatch_detection.anomalies.suppressed import SuppressedFindings
from warpwatch_detection.anomalies.worst import worse
from warpwatch_detection.config import AnomaliesConfig
from warpwatch_detection.detector import NEVER, Cleared, Results
from warpwatch_telemetry.anomalies import DEVICE_KINDS, EVENT_KINDS, Anomaly, Detected
from warpwatch_telemetry.jobs import JobId
from warpwatch_telemetry.xids import SEVERITIES

# Of devices, and of jobs.
MAX_ACTIVE = 1000
# Of jobs of one owner.
MAX_ACTIVE_OF_OWNER = 100
MAX_ENDED = 1000
MAX_HISTORY = 1000
MAX_EFFECTS = 4


class AnomalyRegister:
    """``ranks``: which rank runs on which device, kept up by the engine."""

    def __init__(self, config: AnomaliesConfig, ranks: RankDevices) -> None:
        self._config = config
        self.ranks = ranks
        self._state = RegisterState()
        self._deadline = NEVER
        self._changes: list[Change] = []
        self.history: deque[Anomaly] = deque(maxlen=MAX_HISTORY)
        self.suppressed = SuppressedFindings(self._state.suppressed)
        # Anomalies that were too many.
        self.refused = 0

    @property
    def active(self) -> tuple[Anomaly, ...]:
        return tuple(tracked.anomaly for tracked in self.state.active.values())

    @property
    def state(self) -> RegisterState:
        return self._state

    @state.setter
    def state(self, state: RegisterState) -> None:
        self._state = state
        self.suppressed.known = state.suppressed
        self._schedule()

    def deadline(self) -> float:
        """When the next event has been held long enough."""
        return self._deadline

    def _schedule(self) -> None:
        held = (tracked.held_until for tracked in self.state.active.values())
        self._deadline = min(held, default=NEVER)

    # --- what may change an anomaly ---

    def take(self, kind: str, verdicts: Results, why: str = "") -> list[Change]:
        """What a detector has said. ``why`` something is over: for the summary."""
        for verdict in verdicts:
            if isinstance(verdict, Cleared):
                self._fine(kind, verdict, why)
            else:
                self._found(kind, verdict)
        return self._take_changes()

    def expire(self, now: float) -> list[Change]:
        for key, tracked in list(self.state.active.items()):
            if tracked.held_until <= now:
                self._close(key, tracked.held_until)
        return self._take_changes()

    def end_job(self, job: JobId, time: float) -> list[Change]:
        """The states of the job are over with it; its events keep their time."""
        self.suppressed.forget_job(job)
        for key in [key for key in self.state.active if key[1] == job]:
            if key[0] not in EVENT_KINDS:
                self._close(key, time, why=", until the job ended")
        for ended in [key for key in self.state.ended if key[1] == job]:
            if ended[0] not in EVENT_KINDS:
                del self.state.ended[ended]
        return self._take_changes()

    def end_unjudged(self, judged: set[str], time: float, why: str) -> list[Change]:
        """End what no detector follows any more; events keep their time. why: for the summary."""
        for key in list(self.suppressed.known):
            if key[0] not in judged:
                self.suppressed.forget(key)
        for key in list(self.state.active):
            if key[0] not in judged and key[0] not in EVENT_KINDS:
                self._close(key, time, why=why)
        return self._take_changes()

    def _take_changes(self) -> list[Change]:
        changes, self._changes = self._changes, []
        return changes

    # --- verdicts ---

    def _found(self, kind: str, found: Detected) -> None:
        key = (kind, found.job_id, found.device)
        if cause := self._cause(key, found):
            self._explain(key, found, cause)
            return
        tracked = self.state.active.get(key)
        if tracked is not None and not tracked.is_of_another_rank(found):
            self._update("updated", key, tracked, found)
        elif tracked is None and (over := self._ended_cause(key, found)):
            self.suppressed.add(key, found, over)
        elif tracked is not None or self.suppressed.outlives_cause(key, found):
            ended = self._recently_ended(key, found)
            if tracked is not None:
                self._replace_culprit(key, tracked, ended, found)
            if ended is None:
                self._open(key, found)
            else:
                self._update("reopened", key, ended, found)

    def _fine(self, kind: str, fine: Cleared, why: str = "") -> None:
        key = (kind, fine.job_id, fine.device)
        self.suppressed.forget(key)
        self._close(key, fine.time, why=why)
        if fine.for_good:
            for ended in self._ended_like(key, rank=None):
                del self.state.ended[ended]

    # --- opening and updating ---

    def _open(self, key: Key, found: Detected) -> None:
        if not self._has_room(key[1]):
            self.refused += 1
            return
        self.state.count += 1
        ident = f"{int(found.time):x}-{self.state.count:x}"
        about = asdict(self.ranks.located(found))
        anomaly = Anomaly(**about, id=ident, kind=key[0], first_summary=found.summary)
        tracked = TrackedAnomaly(anomaly, found, worse(key[0], None, found))
        self._keep("opened", key, tracked, found)
        self._explain_by_newest(key)

    def _has_room(self, job: JobId | None) -> bool:
        """Whether one more is kept; jobs leave that of devices to them, and owners each other's."""
        if job is None:
            return sum(key[1] is None for key in self.state.active) < MAX_ACTIVE
        owners = [key[1].owner for key in self.state.active if key[1] is not None]
        has_part = not job.owner or owners.count(job.owner) < MAX_ACTIVE_OF_OWNER
        return len(owners) < MAX_ACTIVE and has_part

    def _update(
        self,
        what: Literal["reopened", "updated"],
        key: Key,
        tracked: TrackedAnomaly,
        found: Detected,
    ) -> None:
        located = self.ranks.located(found)
        before = with_job(tracked.anomaly, located.job_id)
        rank = located.rank
        if rank is None and key[0] in DEVICE_KINDS:
            # The one that ran on the device when it was raised.
            rank = before.rank
        tracked.update(found)
        severity = max(before.severity, found.severity, key=SEVERITIES.index)
        tracked.anomaly = replace(
            before,
            severity=severity,
            rank=None if tracked.shared else rank,
            device=located.device or before.device,
            gpu=located.gpu if before.gpu is None else before.gpu,
            first_summary=before.first_summary if severity == before.severity else found.summary,
        )
        self._keep(what, key, tracked, found)

    def _keep(
        self,
        what: Literal["opened", "reopened", "updated"],
        key: Key,
        tracked: TrackedAnomaly,
        found: Detected,
    ) -> None:
        if found.rank is not None:
            tracked.named = found.rank
        before = NONE if what == "reopened" else tracked.evidence
        tracked.evidence = max(before, evidence(self.state.cores, key[0], found))
        self.state.active[key] = tracked
        if key[0] in EVENT_KINDS:
            tracked.held_until = found.time + self._config.hold_s
            self._schedule()
        tracked.summarize(is_new=what != "updated")
        self._changes.append(Change(what, tracked.anomaly))

    # --- closing and continuing ---

    def _close(self, key: Key, time: float, explained_by: str | None = None, why: str = "") -> None:
        """Nothing if there is no such anomaly. ``why``: for the summary."""
        tracked = self.state.active.pop(key, None)
        if tracked is None:
            return
        if key[0] in EVENT_KINDS:
            self._schedule()
        tracked.end_step = self.ranks.newest_step(key[1])
        end_time = max(time, tracked.anomaly.time)
        tracked.end(end_time, explained_by, why)
        closed = tracked.anomaly
        self.history.append(closed)
        self._changes.append(Change("closed", closed))
        ended = self.state.ended
        # Again at the end of the order.
        ended.pop((*key, tracked.named), None)
        ended[(*key, tracked.named)] = tracked
        if len(ended) > MAX_ENDED:
            del ended[next(iter(ended))]
        for released, found in self.suppressed.release(closed, end_time, self._config.hold_s):
            self._found(released[0], found)

    def _recently_ended(self, key: Key, found: Detected) -> TrackedAnomaly | None:
        """The anomaly that was over a moment ago and now goes on, without its end."""
        for ended in self._ended_like(key, found.rank):
            tracked = self.state.ended.pop(ended)
            before = tracked.anomaly
            if before.end_time is None or found.time - before.end_time > self._config.reopen_s:
                continue
            if before in self.history:
                self.history.remove(before)
            tracked.anomaly = replace(
                before, end_time=None, explained_by=None, reopened=before.reopened + 1
            )
            return tracked
        return None

    def _ended_like(self, key: Key, rank: int | None) -> list[EndedKey]:
        """Those that ended of the same rank, else of an unknown one; without a rank, of any."""
        if rank is None:
            return [ended for ended in self.state.ended if ended[:3] == key]
        return [ended for ended in ((*key, rank), (*key, None)) if ended in self.state.ended]

    def _replace_culprit(
        self, key: Key, tracked: TrackedAnomaly, ended: TrackedAnomaly | None, found: Detected
    ) -> None:
        """Another rank is another anomaly; a rank that was it before makes it one of the job."""
        tracked.anomaly = replace(tracked.anomaly, rank=tracked.named)
        self._close(key, found.time, None if ended is None else ended.anomaly.id)
        if ended is not None:
            ended.shared = True
            self.state.ended.pop((*key, tracked.named), None)

    # --- explaining ---

    def _cause(self, key: Key, found: Detected) -> TrackedAnomaly | None:
        return cause_of(key, found.rank, found.severity, self.state.active, self.ranks)

    def _ended_cause(self, key: Key, found: Detected) -> Anomaly | None:
        """The cause that was over when this was first found, but not when it began."""
        if key[0] not in LONG_EVIDENCE or key in self.suppressed.known or found.begin_step is None:
            return None
        for (kind, job, _, _), tracked in reversed(self.state.ended.items()):
            explains = job == key[1] and kind in EXPLAINED_BY[key[0]]
            if explains and tracked.end_step >= found.begin_step:
                return tracked.anomaly
        return None

    def _explain(self, key: Key, found: Detected, cause: TrackedAnomaly) -> None:
        """``cause`` is active: what is found is its effect and no anomaly of its own."""
        about = cause.anomaly
        self._close(key, found.time, about.id)
        self.suppressed.add(key, found, about)
        if about.kind in DEVICE_KINDS:
            self._add_effect(cause, key, found)

    def _add_effect(self, cause: TrackedAnomaly, key: Key, found: Detected) -> None:
        if key[1] is None and key[0] in EVENT_KINDS:
            # As long as the error shows in either way.
            cause.held_until = max(cause.held_until, found.time + self._config.hold_s)
            self._schedule()
        name = f"{key[0]} of {found.job or key[2]}"
        if name not in cause.effects and len(cause.effects) >= MAX_EFFECTS:
            return
        said = f"in {found.job} {found.summary}" if found.job else found.summary
        cause.effects[name] = worse(key[0], cause.effects.get(name), found, said)
        before = cause.anomaly
        cause.anomaly = replace(
            before if before.job else with_job(before, found.job_id),
            rank=found.rank if before.rank is None and not before.job else before.rank,
            severity=max(before.severity, found.severity, key=SEVERITIES.index),
        )
        cause.summarize()
        self._changes.append(Change("updated", cause.anomaly))

    def _explain_by_newest(self, opened: Key) -> None:
        """What was found before its cause ends, and becomes an effect of the cause."""
        for key, tracked in list(self.state.active.items()):
            cause = self._cause(key, tracked.anomaly)
            if key == opened or cause is None:
                continue
            time = self.state.active[opened].anomaly.time
            effect = replace(tracked.found(), time=time, device=key[2])
            self._explain(key, effect, cause)
