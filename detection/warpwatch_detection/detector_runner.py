"""All detectors at once: each is shown what it reads, and asked when its deadline falls.

A detector that raises costs none of the others the record; it is counted, and not asked for the
same deadline again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from warpwatch_detection.anomalies.register import Register
from warpwatch_detection.config import AnomaliesConfig, DetectionConfig
from warpwatch_detection.detectors import build
from warpwatch_detection.detectors.base import (
    NEVER,
    Detector,
    JobStep,
    ReadsSteps,
    Verdict,
    Waiting,
    is_waiting,
)
from warpwatch_telemetry.anomalies import Anomaly
from warpwatch_telemetry.records import Step

# A detector, what shows it an observation, and its place in the dues (-1 without deadlines).
Reader = tuple[Detector, Callable[[Any], Iterable[Verdict] | None], int]


class Panel:
    """Verdicts go to ``register``, and what they change to the ``changes`` of the caller.

    due_time: the earliest deadline of the register's and of all detectors, -NEVER where it is not
    known. failures: observations that a detector could not take, by its kind.
    """

    def __init__(
        self, kinds: DetectionConfig, anomalies: AnomaliesConfig, register: Register
    ) -> None:
        self.detectors = build(kinds, anomalies)
        self.failures: Counter[str] = Counter()
        self.due_time = -NEVER
        self._register = register
        # Those that wait for something, and until when (empty: to be looked up).
        self._timed = [one for one in self.detectors if is_waiting(one)]
        self._dues: list[float] = []
        # By slot, the deadline that a detector failed at.
        self._failed_dues: dict[int, float] = {}
        self._readers = _readers(self.detectors, self._timed)
        self._step_readers = self._readers.get(Step, [])
        self._job_step_readers = self._readers.get(JobStep, [])
        # The first failure that nobody was told.
        self._failure: Exception | None = None

    def show(self, record: Any, changes: list[Anomaly]) -> None:
        """Any record but a step."""
        self._show(record, self._readers.get(type(record), []), changes)

    def show_steps(self, steps: list[Step], changes: list[Anomaly]) -> bool:
        """Steps of one job; False if one of those who read them has answered."""
        return self._show(steps, self._step_readers, changes)

    def show_job_step(self, step: JobStep, changes: list[Anomaly]) -> None:
        self._show(step, self._job_step_readers, changes)

    def forget(self, job: str) -> None:
        for detector in self.detectors:
            try:
                detector.forget(job)
            except Exception as error:
                self._fail(detector.kind, error)
        self.look_up_dues()

    def take_failure(self) -> Exception | None:
        """What a detector raised since the last call, the first of it."""
        failure, self._failure = self._failure, None
        return failure

    # --- deadlines ---

    def look_up_dues(self) -> None:
        """Whatever detectors remember has changed."""
        dues = enumerate(detector.state.deadline for detector in self._timed)
        failed = self._failed_dues
        self._dues = [NEVER if failed.get(slot) == due else due for slot, due in dues]
        self.due_time = -NEVER

    def expire(
        self, until: float, put_off: Callable[[float], float], changes: list[Anomaly]
    ) -> bool:
        """What falls due ``until`` then. put_off: when a detector's deadline falls. True if a
        detector was asked."""
        if not self._dues:
            self.look_up_dues()
        is_asked = False
        while (now := self._deadline(put_off)) <= until and now < NEVER:
            self._register.expire(now, changes)
            for slot, detector in enumerate(self._timed):
                if put_off(self._dues[slot]) <= now:
                    is_asked = True
                    self._ask(slot, detector, now, changes)
                    self.look_up_dues()
        self.due_time = now
        return is_asked

    def _deadline(self, put_off: Callable[[float], float]) -> float:
        return min(put_off(min(self._dues, default=NEVER)), self._register.deadline())

    def _ask(self, slot: int, detector: Waiting, now: float, changes: list[Anomaly]) -> None:
        due = detector.state.deadline
        try:
            self._register.take(detector.kind, detector.expire(now), changes)
        except Exception as error:
            self._failed_dues[slot] = due
            self._fail(detector.kind, error)

    # --- one after the other ---

    def _show(self, seen: Any, readers: list[Reader], changes: list[Anomaly]) -> bool:
        is_calm = True
        for detector, observe, slot in readers:
            try:
                verdicts = observe(seen)
                if verdicts is None:
                    continue
                is_calm = False
                if verdicts:
                    self._register.take(detector.kind, verdicts, changes)
                    self.due_time = -NEVER
            except Exception as error:
                is_calm = False
                self._fail(detector.kind, error)
            if slot >= 0 and (due := self._timed[slot].state.deadline) != self._dues[slot]:
                self._dues[slot] = NEVER if self._failed_dues.get(slot) == due else due
                self.due_time = -NEVER
        return is_calm

    def _fail(self, kind: str, error: Exception) -> None:
        self.failures[kind] += 1
        self._failure = self._failure or error


def _readers(detectors: list[Detector], timed: list[Waiting]) -> dict[type, list[Reader]]:
    """Those that read a type of observation, in the order in which they judge."""
    readers: dict[type, list[Reader]] = {}
    for detector in detectors:
        slot = timed.index(detector) if detector in timed else -1
        for seen in detector.reads:
            observe: Callable[[Any], Iterable[Verdict] | None] = detector.observe
            if seen is Step and isinstance(detector, ReadsSteps):
                observe = detector.observe_steps
            readers.setdefault(seen, []).append((detector, observe, slot))
    return readers
