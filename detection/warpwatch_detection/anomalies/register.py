"""Verdicts into anomalies: opened once, updated, explained, closed, and continued if they return.

Pure and without a clock, as the detectors: times are those of the verdicts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace

from warpwatch_detection.anomalies.explanation import cause_of
from warpwatch_detection.anomalies.rank_devices import RankDevices
from warpwatch_detection.anomalies.register_state import (
    EndedKey,
    Key,
    RegisterState,
    TrackedAnomaly,
)
from warpwatch_detection.anomalies.suppressed import SuppressedFindings
from warpwatch_detection.config import AnomaliesConfig
from warpwatch_detection.detector import NEVER, Fine, Found, Verdict
from warpwatch_telemetry.anomalies import DEVICE_KINDS, EVENT_KINDS, Anomaly, Severity
from warpwatch_telemetry.xid import SEVERITIES

MAX_ACTIVE = 1000
MAX_ENDED = 1000
MAX_HISTORY = 1000
MAX_EFFECTS = 4

Changes = list[Anomaly]


class AnomalyRegister:
    """``changes`` of its methods takes every anomaly that was opened, changed or closed."""

    def __init__(self, config: AnomaliesConfig, rank_devices: Callable[[], RankDevices]) -> None:
        self._config = config
        self._ranks = rank_devices
        self._state = RegisterState()
        self._deadline = NEVER
        self.history: deque[Anomaly] = deque(maxlen=MAX_HISTORY)
        self.shadows = SuppressedFindings(self._state.shadows)
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
        self.shadows.known = state.shadows
        self._schedule()

    def deadline(self) -> float:
        """When the next event has been held long enough."""
        return self._deadline

    def _schedule(self) -> None:
        held = (tracked.held_until for tracked in self.state.active.values())
        self._deadline = min(held, default=NEVER)

    def expire(self, now: float, changes: Changes) -> None:
        for key, known in list(self.state.active.items()):
            if known.held_until <= now:
                self.close(key, known.held_until, changes)

    # --- what the detectors say ---

    def take(self, kind: str, verdicts: Iterable[Verdict], changes: Changes) -> None:
        for verdict in verdicts:
            if isinstance(verdict, Fine):
                self._fine(kind, verdict, changes)
            else:
                self._found(kind, verdict, changes)

    def _found(self, kind: str, found: Found, changes: Changes) -> None:
        key = (kind, found.job, found.device)
        if cause := self._cause(key, found.rank, found.severity):
            self._explain(key, found, cause, changes)
            return
        known = self.state.active.get(key)
        if known is None:
            if not self.shadows.stands_alone(key):
                return
            known = None if found.separate else self._continued(key, found)
        elif _another(known, found):
            known = self._next_culprit(key, known, found, changes)
        if known is None:
            self._open(key, found, changes)
        else:
            self._update(key, known, found, changes)

    def _cause(self, key: Key, rank: int | None, severity: Severity) -> TrackedAnomaly | None:
        return cause_of(key, rank, severity, self.state.active, self._ranks())

    def _fine(self, kind: str, fine: Fine, changes: Changes) -> None:
        key = (kind, fine.job, fine.device)
        self.shadows.forget(key)
        self.close(key, fine.time, changes)

    def end_job(self, job: str, time: float, changes: Changes) -> None:
        """The states of the job are over with it; its events keep their time."""
        self.shadows.forget_job(job)
        for key in [key for key in self.state.active if key[1] == job]:
            if key[0] not in EVENT_KINDS:
                self.close(key, time, changes)
        for ended in [key for key in self.state.ended if key[1] == job]:
            if ended[0] not in EVENT_KINDS:
                del self.state.ended[ended]

    # --- opening and updating ---

    def _open(self, key: Key, found: Found, changes: Changes) -> None:
        if len(self.state.active) >= MAX_ACTIVE:
            self.refused += 1
            return
        self.state.count += 1
        ident = f"{int(found.time):x}-{self.state.count:x}"
        tracked = TrackedAnomaly(self._anomaly(key[0], found, ident), found.summary)
        self._show(key, tracked, found, changes)
        self._take_effects(key, changes)

    def _update(self, key: Key, known: TrackedAnomaly, found: Found, changes: Changes) -> None:
        before = known.anomaly
        fresh = self._anomaly(key[0], found, before.id)
        known.said = found.summary
        known.anomaly = replace(
            fresh,
            time=before.time,
            step=before.step,
            begin_step=before.begin_step,
            severity=max(before.severity, fresh.severity, key=SEVERITIES.index),
            job=fresh.job or before.job,
            rank=_rank(known, fresh),
            device=fresh.device or before.device,
            reopened=before.reopened,
        )
        self._show(key, known, found, changes)

    def _show(self, key: Key, tracked: TrackedAnomaly, found: Found, changes: Changes) -> None:
        if key[0] in EVENT_KINDS:
            tracked.held_until = found.time + self._config.hold_s
        if found.rank is not None:
            tracked.named = found.rank
        self.state.active[key] = tracked
        if key[0] in EVENT_KINDS:
            self._schedule()
        self._tell(tracked, changes)

    def _tell(self, tracked: TrackedAnomaly, changes: Changes) -> None:
        effects = tuple(tracked.effects.values())
        summary = "; ".join((tracked.said, *effects))
        tracked.anomaly = replace(tracked.anomaly, summary=summary, effects=effects)
        changes.append(tracked.anomaly)

    def _anomaly(self, kind: str, found: Found, ident: str) -> Anomaly:
        job, rank, device = found.job, found.rank, found.device
        if job is None and device is not None:
            job, rank = self._ranks().occupant(device)
        elif job is not None and rank is not None and device is None:
            device = self._ranks().device(job, rank)
        return Anomaly(
            id=ident,
            time=found.time,
            kind=kind,
            severity=found.severity,
            summary=found.summary,
            job=job,
            rank=rank,
            device=device,
            step=found.step,
            begin_step=found.begin_step,
            value=found.value,
            baseline=found.baseline,
        )

    # --- closing and continuing ---

    def close(
        self, key: Key, time: float, changes: Changes, explained_by: str | None = None
    ) -> None:
        """Nothing if there is no such anomaly."""
        tracked = self.state.active.pop(key, None)
        if tracked is None:
            return
        if key[0] in EVENT_KINDS:
            self._schedule()
        before = tracked.anomaly
        end_time = max(time, before.time)
        tracked.anomaly = replace(before, end_time=end_time, explained_by=explained_by)
        self.history.append(tracked.anomaly)
        changes.append(tracked.anomaly)
        ended = self.state.ended
        # Again at the end of the order.
        ended.pop((*key, tracked.named), None)
        ended[(*key, tracked.named)] = tracked
        if len(ended) > MAX_ENDED:
            del ended[next(iter(ended))]
        for shadow, found in self.shadows.bereaved(before, end_time, self._config.hold_s):
            self._found(shadow[0], found, changes)

    def end_untold(self, key: Key, time: float, changes: Changes) -> None:
        """Close with the tracked's newest words, which no verdict has brought."""
        self._tell(self.state.active[key], [])
        self.close(key, time, changes)

    def _continued(self, key: Key, found: Found) -> TrackedAnomaly | None:
        """The anomaly that was over a moment ago and now goes on."""
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

    def _next_culprit(
        self, key: Key, known: TrackedAnomaly, found: Found, changes: Changes
    ) -> TrackedAnomaly | None:
        """Another rank is another anomaly; a rank that was it before makes it one of the job."""
        before = self._continued(key, found)
        known.anomaly = replace(known.anomaly, rank=known.named)
        self.close(key, found.time, changes, None if before is None else before.anomaly.id)
        if before is not None:
            before.shared = True
            self.state.ended.pop((*key, known.named), None)
        return before

    # --- explaining ---

    def _explain(self, key: Key, found: Found, cause: TrackedAnomaly, changes: Changes) -> None:
        """``cause`` is active: what is found is its effect and no anomaly of its own."""
        told = cause.anomaly
        self.close(key, found.time, changes, told.id)
        self.shadows.note(key, found, told)
        if told.kind in DEVICE_KINDS:
            self._add_effect(cause, key, found, changes)

    def _add_effect(self, cause: TrackedAnomaly, key: Key, found: Found, changes: Changes) -> None:
        name = f"{key[0]} of {found.job}"
        if name not in cause.effects and len(cause.effects) >= MAX_EFFECTS:
            return
        cause.effects[name] = f"in {found.job} {found.summary}"
        before = cause.anomaly
        cause.anomaly = replace(
            before,
            job=before.job or found.job,
            rank=found.rank if before.rank is None and not before.job else before.rank,
            severity=max(before.severity, found.severity, key=SEVERITIES.index),
        )
        self._tell(cause, changes)

    def _take_effects(self, opened: Key, changes: Changes) -> None:
        """What was found before its cause ends, and is told by the cause from now on."""
        for key, tracked in list(self.state.active.items()):
            about = tracked.anomaly
            cause = self._cause(key, about.rank, about.severity)
            if key == opened or cause is None:
                continue
            effect = Found(
                time=self.state.active[opened].anomaly.time,
                severity=about.severity,
                summary=tracked.said,
                job=about.job,
                rank=about.rank,
                device=key[2],
                step=about.step,
                begin_step=about.begin_step,
                value=about.value,
                baseline=about.baseline,
            )
            self._explain(key, effect, cause, changes)


def _another(known: TrackedAnomaly, found: Found) -> bool:
    """Whether the verdict names another rank than the anomaly does."""
    if known.shared or None in (known.named, found.rank):
        return False
    return known.named != found.rank


def _rank(known: TrackedAnomaly, fresh: Anomaly) -> int | None:
    """The rank to blame: of several none, and of a device the one that was there."""
    if known.shared:
        return None
    if fresh.rank is None and fresh.kind in DEVICE_KINDS:
        return known.anomaly.rank
    return fresh.rank
