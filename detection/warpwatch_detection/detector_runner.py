"""All detectors at once: each is shown what it reads, and asked when its deadline falls.

A detector that raises costs none of the others the record; it is counted, and not asked for the
same deadline again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from warpwatch_detection.anomalies.changes import Change
from warpwatch_detection.anomalies.register import AnomalyRegister
from warpwatch_detection.detector import NEVER, Detector, Observation, Results, is_waiting
from warpwatch_telemetry.jobs import JobId

# A kind, what shows its detector an observation, and its place in the dues (-1 without deadlines).
Reader = tuple[str, Callable[[Observation], Results], int]


class DetectorRunner:
    """Verdicts go to ``register``; methods return what they change there.

    due_time: the earliest deadline of the register's and of all detectors, -NEVER where it is not
    known. failures: observations that a detector could not take, by its kind.
    """

    def __init__(self, detectors: Sequence[Detector], register: AnomalyRegister) -> None:
        self.detectors = detectors
        self.failures: Counter[str] = Counter()
        self.due_time = -NEVER
        self._register = register
        # Those that wait for something, until when, and, by slot, the deadlines that failed.
        self._timed = [one for one in detectors if is_waiting(one)]
        self._states: list[Any] = []
        self._dues: list[float] = []
        self._failed_dues: dict[int, float] = {}
        self._readers = _readers(detectors, self._timed)
        self._failure: Exception | None = None
        self.look_up_dues()

    def show(self, seen: Observation) -> list[Change]:
        """To all who read its type, in the order in which they judge."""
        changes: list[Change] = []
        dues, states = self._dues, self._states
        for kind, observe, slot in self._readers.get(type(seen), ()):
            try:
                verdicts = observe(seen)
                if verdicts:
                    changes += self._register.take(kind, verdicts)
                    self.due_time = -NEVER
            except Exception as error:
                self._fail(kind, error)
            if slot >= 0 and (due := states[slot].deadline) != dues[slot]:
                dues[slot] = NEVER if self._failed_dues.get(slot) == due else due
                self.due_time = -NEVER
        return changes

    def forget(self, job: JobId) -> None:
        for detector in self.detectors:
            try:
                detector.forget(job)
            except Exception as error:
                self._fail(detector.kind, error)
        self.look_up_dues()

    def pop_failure(self) -> Exception | None:
        """What a detector raised since the last call, the first of it."""
        failure, self._failure = self._failure, None
        return failure

    # --- deadlines ---

    def look_up_dues(self) -> None:
        """After detectors were given other states."""
        self._states = [detector.state for detector in self._timed]
        dues = enumerate(state.deadline for state in self._states)
        failed = self._failed_dues
        self._dues = [NEVER if failed.get(slot) == due else due for slot, due in dues]
        self.due_time = -NEVER

    def expire(self, until: float, put_off: Callable[[float], float]) -> list[Change]:
        """What falls due ``until`` then. put_off: when a detector's deadline falls."""
        changes: list[Change] = []
        while (now := self._deadline(put_off)) <= until and now < NEVER:
            changes += self._register.expire(now)
            for slot, detector in enumerate(self._timed):
                if put_off(self._dues[slot]) <= now:
                    changes += self._ask(slot, detector, now)
                    self.look_up_dues()
        self.due_time = now
        return changes

    def _deadline(self, put_off: Callable[[float], float]) -> float:
        return min(put_off(min(self._dues, default=NEVER)), self._register.deadline())

    def _ask(self, slot: int, detector: Detector, now: float) -> list[Change]:
        due = detector.state.deadline
        try:
            return self._register.take(detector.kind, detector.expire(now))
        except Exception as error:
            self._failed_dues[slot] = due
            self._fail(detector.kind, error)
            return []

    def _fail(self, kind: str, error: Exception) -> None:
        self.failures[kind] += 1
        self._failure = self._failure or error


def _readers(detectors: Sequence[Detector], timed: Sequence[Detector]) -> dict[type, list[Reader]]:
    """Those that read a type of observation, in the order in which they judge."""
    readers: dict[type, list[Reader]] = {}
    for detector in detectors:
        slot = timed.index(detector) if detector in timed else -1
        for seen in detector.reads:
            readers.setdefault(seen, []).append((detector.kind, detector.observe, slot))
    return readers
