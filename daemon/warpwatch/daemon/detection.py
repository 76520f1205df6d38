"""The engine: records through the detectors, verdicts into anomalies. Daemon and replay alike.

It has no clock: deadlines fall in the records' own time, before the first record after them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from warpwatch.daemon.config import Config
from warpwatch.daemon.detectors import build
from warpwatch.daemon.detectors.base import NEVER, Detector, Fine, Found, Observation, Verdict
from warpwatch.daemon.detectors.job_steps import JobSteps
from warpwatch.telemetry.anomalies import EVENT_KINDS, Anomaly
from warpwatch.telemetry.records import End, RankEvent, RankSeen, Record, Step

# While one of these is active on the job, it is the cause and the other only its shadow.
EXPLAINED_BY = {"step_regression": ("straggler", "data_stall", "hang", "crash")}
MAX_HISTORY = 1000
MAX_JOBS = 256

# The form that the design gives an anomaly in logs and on the API.
JSON_FIELDS = (
    "time", "kind", "severity", "job", "rank", "device", "step", "begin_step", "value", "baseline",
    "summary",
)  # fmt: skip

# What an anomaly is about: kind, job, device. Several ranks of one cause are one anomaly.
Key = tuple[str, str | None, str | None]


class Detection:
    """``feed`` every record in order of time. Not thread-safe: one owner feeds and reads."""

    def __init__(self, config: Config) -> None:
        self._hold_s = config.anomalies.hold_s
        self._detectors = build(config)
        self._job_steps = JobSteps(config.triggers.capture_timeout_s)
        self._readers: dict[type, list[Detector]] = {}
        for detector in self._detectors:
            for seen in detector.reads:
                self._readers.setdefault(seen, []).append(detector)
        # Jobs, least recently begun first; per job the live ranks and their devices.
        self._ranks: dict[str, dict[int, str | None]] = {}
        self._active: dict[Key, Anomaly] = {}
        self._held_until: dict[Key, float] = {}
        self._count = 0
        self.history: deque[Anomaly] = deque(maxlen=MAX_HISTORY)

    @property
    def active(self) -> tuple[Anomaly, ...]:
        return tuple(self._active.values())

    def feed(self, record: Record) -> list[Anomaly]:
        """Anomalies that the record, or time up to it, opened, changed or closed.

        A closed one has an ``end_time``; an open one that was not there before is new.
        """
        changes = self._expire(record.time) if self._deadline() <= record.time else []
        if type(record) is Step:
            if record.rank not in self._ranks.get(record.job, ()):
                self._join(record.job, record.rank, None)
        elif isinstance(record, RankSeen):
            self._join(record.job, record.rank, record.device)
        self._show(record, changes)
        for joined in self._job_steps.observe(record):
            self._show(joined, changes)
        if isinstance(record, End | RankEvent):
            self._leave(record, changes)
        return changes

    def _show(self, seen: Observation, changes: list[Anomaly]) -> None:
        for detector in self._readers.get(type(seen), ()):
            if verdicts := detector.observe(seen):
                self._take(detector.kind, verdicts, changes)

    def _deadline(self) -> float:
        deadline = min(self._held_until.values()) if self._held_until else NEVER
        for detector in self._detectors:
            if (own := detector.deadline()) < deadline:
                deadline = own
        return deadline

    def _expire(self, until: float) -> list[Anomaly]:
        changes: list[Anomaly] = []
        while (now := self._deadline()) <= until and now < NEVER:
            for key in [key for key, end in self._held_until.items() if end <= now]:
                self._close(key, now, changes)
            for detector in self._detectors:
                if detector.deadline() <= now:
                    self._take(detector.kind, detector.expire(now), changes)
        return changes

    def _take(self, kind: str, verdicts: Iterable[Verdict], changes: list[Anomaly]) -> None:
        for verdict in verdicts:
            key = (kind, verdict.job, verdict.device)
            if isinstance(verdict, Fine):
                self._close(key, verdict.time, changes)
            else:
                self._found(key, verdict, changes)

    def _found(self, key: Key, found: Found, changes: list[Anomaly]) -> None:
        kind, known = key[0], self._active.get(key)
        if known is None and any(
            (cause, key[1], key[2]) in self._active for cause in EXPLAINED_BY.get(kind, ())
        ):
            return
        if known is not None and None not in (known.rank, found.rank) and known.rank != found.rank:
            self._close(key, found.time, changes)
            known = None
        if kind in EVENT_KINDS:
            self._held_until[key] = found.time + self._hold_s
        if known is None:
            self._count += 1
            fresh = self._anomaly(kind, found, f"{int(found.time):x}-{self._count:x}")
        else:
            fresh = replace(
                self._anomaly(kind, found, known.id),
                time=known.time,
                step=known.step,
                begin_step=known.begin_step,
            )
        self._active[key] = fresh
        changes.append(fresh)

    def _anomaly(self, kind: str, found: Found, ident: str) -> Anomaly:
        ranks = self._ranks.get(found.job or "", {})
        device = found.device or (None if found.rank is None else ranks.get(found.rank))
        return Anomaly(
            id=ident,
            time=found.time,
            kind=kind,
            severity=found.severity,
            summary=found.summary,
            job=found.job,
            rank=found.rank,
            device=device,
            step=found.step,
            begin_step=found.begin_step,
            value=found.value,
            baseline=found.baseline,
        )

    def _close(self, key: Key, time: float, changes: list[Anomaly]) -> None:
        self._held_until.pop(key, None)
        if known := self._active.pop(key, None):
            ended = replace(known, end_time=time)
            self.history.append(ended)
            changes.append(ended)

    def _join(self, name: str, rank: int, device: str | None) -> None:
        if name not in self._ranks and len(self._ranks) >= MAX_JOBS:
            self._forget(next(iter(self._ranks)))
        ranks = self._ranks.setdefault(name, {})
        ranks[rank] = device or ranks.get(rank)

    def _leave(self, record: End | RankEvent, changes: list[Anomaly]) -> None:
        """Ranks that ended or died; the last one takes the job and its states with it."""
        if isinstance(record, RankEvent) and record.event != "died":
            return
        ranks = self._ranks.get(record.job)
        if ranks is None:
            return
        if record.rank is not None:
            ranks.pop(record.rank, None)
        if record.rank is None or not ranks:
            self._forget(record.job)
            for key in [key for key in self._active if key[1] == record.job]:
                if key[0] not in EVENT_KINDS:
                    self._close(key, record.time, changes)

    def _forget(self, name: str) -> None:
        self._ranks.pop(name, None)
        self._job_steps.forget(name)
        for detector in self._detectors:
            detector.forget(name)


def anomaly_to_json(anomaly: Anomaly) -> dict[str, Any]:
    """The anomaly as the log, ``replay --json`` and the API show it; what is unknown is null."""
    return {name: getattr(anomaly, name) for name in JSON_FIELDS}
