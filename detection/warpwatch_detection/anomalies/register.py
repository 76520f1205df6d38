"""Turns results into anomalies: opened once, updated, explained, closed, continued if they return.

It has no clock: times are those of the results.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import asdict, dataclass, field, replace
from typing import Literal

from warpwatch_detection.anomalies.core_contention import NONE, Cores, evidence
from warpwatch_detection.anomalies.explanation import EXPLAINED_BY, cause_of
from warpwatch_detection.anomalies.tracked import (
    EndedKey,
    Key,
    Suppressed,
    TrackedAnomaly,
    recovers,
    worse,
)
from warpwatch_detection.config import AnomaliesConfig
from warpwatch_detection.detector import NEVER, Cleared, KindResults
from warpwatch_detection.ranks import RankDevices, with_job
from warpwatch_telemetry.anomalies import DEVICE_KINDS, EVENT_KINDS, SEVERITIES, Anomaly, Detected
from warpwatch_telemetry.jobs import JobId

# The most active anomalies about devices, and about jobs.
MAX_ACTIVE = 1000
MAX_ACTIVE_OF_OWNER = 100
MAX_ENDED = 1000
MAX_HISTORY = 1000
MAX_EFFECTS = 4
MAX_SUPPRESSED = 1000
# Detectors work in blocks that end at different times, so an effect may be found once or twice more
# after its cause is over. The third time it is an anomaly of its own.
FOUND_AFTER_CAUSE = 3
# The evidence of these comes from hundreds of steps: if it started before a cause ended, it is an
# effect of that.
LONG_EVIDENCE = frozenset({"step_spikes"})
# Users notice these, so their cause refers to them, also if it is a fault of the same job.
SHOWN_EFFECTS = frozenset({"latency_regression"})
# Detectors find these only once, however long they last, so not again when their cause is over.
FOUND_ONCE = frozenset({"hang", "crash", "oom", "memory_leak", "memory_pressure", "kv_thrash"})

What = Literal["opened", "reopened", "updated", "closed"]


@dataclass(frozen=True, slots=True)
class Change:
    """A change, with the anomaly after it; "reopened" means that it returned soon after its end."""

    what: What
    anomaly: Anomaly


@dataclass(slots=True)
class RegisterState:
    """The part of the register that survives a restart of the daemon.

    ended: anomalies that may be continued, in the order of their end. suppressed: findings that an
    active anomaly explains. cores: the ranks' waits for a core.
    """

    count: int = 0
    active: dict[Key, TrackedAnomaly] = field(default_factory=dict)
    ended: dict[EndedKey, TrackedAnomaly] = field(default_factory=dict)
    suppressed: dict[Key, Suppressed] = field(default_factory=dict)
    cores: Cores = field(default_factory=dict)


class AnomalyRegister:
    """All anomalies of one engine, which keeps ``ranks`` up to date.

    deadline: when the next event has been held for long enough. refused: the number of anomalies
    that were not opened, because there were too many. suppressed_counts: how often a kind (the
    first) was explained by another (the second).
    """

    def __init__(self, config: AnomaliesConfig, ranks: RankDevices) -> None:
        self._config = config
        self.ranks = ranks
        self.state = RegisterState()
        self.deadline = NEVER
        self._changes: list[Change] = []
        self.history: deque[Anomaly] = deque(maxlen=MAX_HISTORY)
        self.suppressed_counts: Counter[tuple[str, str]] = Counter()
        self.refused = 0

    @property
    def active(self) -> tuple[Anomaly, ...]:
        return tuple(tracked.anomaly for tracked in self.state.active.values())

    def restore(self, state: RegisterState) -> None:
        self.state = state
        self._schedule()

    def _schedule(self) -> None:
        held = (tracked.held_until for tracked in self.state.active.values())
        self.deadline = min(held, default=NEVER)

    # --- changes ---

    def apply(self, results: KindResults, why: str = "") -> list[Change]:
        """Apply results in their order. The summary of a cleared anomaly ends with ``why``."""
        for kind, result in results:
            if isinstance(result, Cleared):
                self._clear(kind, result, why)
            else:
                self._find(kind, result)
        return self._pop_changes()

    def expire(self, now: float) -> list[Change]:
        """Close the events that were held for long enough."""
        for key, tracked in list(self.state.active.items()):
            if tracked.held_until <= now:
                self._close(key, tracked.held_until)
        return self._pop_changes()

    def end_job(self, job: JobId, time: float) -> list[Change]:
        """Close the anomalies of a job that ended, but events are held for their time."""
        for key in [key for key in self.state.suppressed if key[1] == job]:
            del self.state.suppressed[key]
        for key in [key for key in self.state.active if key[1] == job]:
            if key[0] not in EVENT_KINDS:
                self._close(key, time, why=", until the job ended")
        for ended in [key for key in self.state.ended if key[1] == job]:
            if ended[0] not in EVENT_KINDS:
                del self.state.ended[ended]
        return self._pop_changes()

    def end_other_kinds(self, kinds: set[str], time: float, why: str) -> list[Change]:
        """Close the anomalies of all kinds but ``kinds``, except events; summaries get ``why``."""
        for key in [key for key in self.state.suppressed if key[0] not in kinds]:
            del self.state.suppressed[key]
        for key in list(self.state.active):
            if key[0] not in kinds and key[0] not in EVENT_KINDS:
                self._close(key, time, why=why)
        return self._pop_changes()

    def _pop_changes(self) -> list[Change]:
        changes, self._changes = self._changes, []
        return changes

    # --- results ---

    def _find(self, kind: str, found: Detected) -> None:
        key = (kind, found.job_id, found.device)
        if cause := self._cause(key, found):
            self._explain(key, found, cause)
            return
        tracked = self.state.active.get(key)
        if tracked is not None and not tracked.is_of_another_rank(found):
            self._update("updated", key, tracked, found)
        elif over := self._ended_cause(key, found):
            self._suppress(key, found, over)
        elif tracked is not None or self._outlives_cause(key, found):
            ended = self._pop_ended(key, found)
            if tracked is not None:
                self._replace_culprit(key, tracked, ended, found)
            if ended is None:
                self._open(key, found)
            else:
                self._update("reopened", key, ended, found)

    def _clear(self, kind: str, cleared: Cleared, why: str) -> None:
        key = (kind, cleared.job_id, cleared.device)
        self.state.suppressed.pop(key, None)
        self._close(key, cleared.time, why=why)
        if cleared.for_good:
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
        """Return whether there is room: devices, jobs and each owner's jobs have limits."""
        if job is None:
            return sum(key[1] is None for key in self.state.active) < MAX_ACTIVE
        owners = [key[1].owner for key in self.state.active if key[1] is not None]
        has_part = not job.owner or owners.count(job.owner) < MAX_ACTIVE_OF_OWNER
        return len(owners) < MAX_ACTIVE and has_part

    def _update(self, what: What, key: Key, tracked: TrackedAnomaly, found: Detected) -> None:
        located = self.ranks.located(found)
        before = with_job(tracked.anomaly, located.job_id)
        rank = located.rank
        if rank is None and key[0] in DEVICE_KINDS and before.job_id == tracked.anomaly.job_id:
            # The rank of the same job that ran on the device before.
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

    def _keep(self, what: What, key: Key, tracked: TrackedAnomaly, found: Detected) -> None:
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
        """Close the anomaly, if there is one. Its summary ends with ``why``."""
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
        ended[(*key, tracked.named)] = tracked
        if len(ended) > MAX_ENDED:
            del ended[next(iter(ended))]
        self._release_effects(closed, end_time)

    def _pop_ended(self, key: Key, found: Detected) -> TrackedAnomaly | None:
        """Remove and return the anomaly that ended a moment ago and now continues."""
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
        """Return the ended anomalies of this rank and those without a rank; all if it is None."""
        if rank is None:
            return [ended for ended in self.state.ended if ended[:3] == key]
        return [ended for ended in ((*key, rank), (*key, None)) if ended in self.state.ended]

    def _replace_culprit(
        self, key: Key, tracked: TrackedAnomaly, ended: TrackedAnomaly | None, found: Detected
    ) -> None:
        """Close the anomaly of another rank. If ranks take turns, it becomes the job's."""
        tracked.anomaly = replace(tracked.anomaly, rank=tracked.named)
        self._close(key, found.time, None if ended is None else ended.anomaly.id)
        if ended is not None:
            ended.shared = True
            self.state.ended.pop((*key, tracked.named), None)

    # --- explaining ---

    def _cause(self, key: Key, found: Detected) -> TrackedAnomaly | None:
        return cause_of(key, found, self.state.active, self.ranks)

    def _ended_cause(self, key: Key, found: Detected) -> Anomaly | None:
        """Return the cause that had ended when this was first found, but not when this started."""
        known = key in self.state.suppressed
        if key[0] not in LONG_EVIDENCE or known or found.begin_step is None:
            return None
        for (kind, job, _, _), tracked in reversed(self.state.ended.items()):
            explains = job == key[1] and kind in EXPLAINED_BY[key[0]]
            if explains and tracked.end_step >= found.begin_step:
                return tracked.anomaly
        return None

    def _explain(self, key: Key, found: Detected, cause: TrackedAnomaly) -> None:
        """Make the finding an effect of the active ``cause``, and close its own anomaly."""
        about = cause.anomaly
        self._close(key, found.time, about.id)
        self._suppress(key, found, about)
        if about.kind in DEVICE_KINDS or key[0] in SHOWN_EFFECTS:
            self._add_effect(cause, key, found)

    def _add_effect(self, cause: TrackedAnomaly, key: Key, found: Detected) -> None:
        if key[1] is None and key[0] in EVENT_KINDS:
            # The event lasts as long as the error is seen in either form.
            cause.held_until = max(cause.held_until, found.time + self._config.hold_s)
            self._schedule()
        name = f"{key[0]} of {found.job or key[2]}"
        if name not in cause.effects and len(cause.effects) >= MAX_EFFECTS:
            return
        of_device = found.job and cause.anomaly.kind in DEVICE_KINDS
        text = f"in {found.job} {found.summary}" if of_device else found.summary
        cause.effects[name] = worse(key[0], cause.effects.get(name), found, text)
        before = cause.anomaly
        severity = max(before.severity, found.severity, key=SEVERITIES.index)
        is_graver_form = key[1] is None and severity != before.severity
        cause.anomaly = replace(
            before if before.job else with_job(before, found.job_id),
            rank=found.rank if before.rank is None and not before.job else before.rank,
            severity=severity,
            first_summary=text if is_graver_form else before.first_summary,
        )
        cause.summarize()
        self._changes.append(Change("updated", cause.anomaly))

    def _explain_by_newest(self, opened: Key) -> None:
        """Close the anomalies that were opened before their cause, and make them its effects."""
        for key, tracked in list(self.state.active.items()):
            cause = self._cause(key, tracked.anomaly)
            if cause is None:
                continue
            time = self.state.active[opened].anomaly.time
            effect = replace(tracked.found(), time=time, device=key[2])
            self._explain(key, effect, cause)

    # --- findings whose cause is active ---

    def _suppress(self, key: Key, found: Detected, cause: Anomaly) -> None:
        known = self.state.suppressed
        before = known.pop(key, None)
        if before is None or before.cause_id != cause.id:
            self.suppressed_counts[key[0], cause.kind] += 1
        since = found.time if before is None else before.since
        known[key] = Suppressed(key[0], found, cause.kind, cause.id, since)
        if len(known) > MAX_SUPPRESSED:
            del known[next(iter(known))]

    def _outlives_cause(self, key: Key, found: Detected) -> bool:
        """Return whether a finding without an active cause is an anomaly of its own.

        Long evidence that fades comes from the time of the cause and does not count.
        """
        suppressed = self.state.suppressed.get(key)
        if suppressed is None:
            return True
        if key[0] in LONG_EVIDENCE and recovers(key[0], found, suppressed.found):
            return False
        suppressed.again += 1
        if suppressed.again < FOUND_AFTER_CAUSE:
            return False
        del self.state.suppressed[key]
        return True

    def _release_effects(self, cause: Anomaly, time: float) -> None:
        """Open the effects that continue after their cause, and will not be found a second time.

        An event that another event explained was part of it, and is over.
        """
        known = self.state.suppressed
        released = {
            key: one
            for key, one in known.items()
            if one.cause_id == cause.id and key[0] in FOUND_ONCE
        }
        for key in released:
            del known[key]
        for key, one in released.items():
            found = one.found
            is_over = cause.kind in EVENT_KINDS or found.time + self._config.hold_s <= time
            if key[0] not in EVENT_KINDS or not is_over:
                self._find(key[0], replace(found, time=max(time, found.time)))
