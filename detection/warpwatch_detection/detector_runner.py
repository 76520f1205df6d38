"""All detectors at once: each is shown what it reads, and asked when its deadline falls.

A detector that raises costs none of the others the record; it is counted, and not asked for the
same deadline again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from warpwatch_detection.anomalies.register import AnomalyRegister
from warpwatch_detection.config import AnomaliesConfig, DetectionConfig
from warpwatch_detection.detector import (
    NEVER,
    Detector,
    Observation,
    Verdict,
    Waiting,
    is_waiting,
)
from warpwatch_detection.detectors import build
from warpwatch_telemetry.anomalies import Anomaly

# A detector, what shows it an observation, and its place in the dues (-1 without deadlines).
Reader = tuple[Detector, Callable[[Observation], Iterable[Verdict]], int]


class DetectorRunner:
    """Verdicts go to ``register``, and what they change to the ``changes`` of the caller.

    due_time: the earliest deadline of the register's and of all detectors, -NEVER where it is not
    known. failures: observations that a detector could not take, by its kind.
    """

    def __init__(
        self, kinds: DetectionConfig, anomalies: AnomaliesConfig, register: AnomalyRegister
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
        # The first failure that nobody was told.
        self._failure: Exception | None = None

    def show(self, seen: Observation, changes: list[Anomaly]) -> None:
        """To all who read its type, in the order in which they judge."""
        for detector, observe, slot in self._readers.get(type(seen), ()):
            try:
                verdicts = observe(seen)
                if verdicts:
                    self._register.take(detector.kind, verdicts, changes)
                    self.due_time = -NEVER
            except Exception as error:
                self._fail(detector.kind, error)
            if slot >= 0 and (due := self._timed[slot].state.deadline) != self._dues[slot]:
                self._dues[slot] = NEVER if self._failed_dues.get(slot) == due else due
                self.due_time = -NEVER

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
    ) -> None:
        """What falls due ``until`` then. put_off: when a detector's deadline falls."""
        if not self._dues:
            self.look_up_dues()
        while (now := self._deadline(put_off)) <= until and now < NEVER:
            self._register.expire(now, changes)
            for slot, detector in enumerate(self._timed):
                if put_off(self._dues[slot]) <= now:
                    self._ask(slot, detector, now, changes)
                    self.look_up_dues()
        self.due_time = now

    def _deadline(self, put_off: Callable[[float], float]) -> float:
        return min(put_off(min(self._dues, default=NEVER)), self._register.deadline())

    def _ask(self, slot: int, detector: Waiting, now: float, changes: list[Anomaly]) -> None:
        due = detector.state.deadline
        try:
            self._register.take(detector.kind, detector.expire(now), changes)
        except Exception as error:
            self._failed_dues[slot] = due
            self._fail(detector.kind, error)

    def _fail(self, kind: str, error: Exception) -> None:
        self.failures[kind] += 1
        self._failure = self._failure or error


def _readers(detectors: list[Detector], timed: list[Waiting]) -> dict[type, list[Reader]]:
    """Those that read a type of observation, in the order in which they judge."""
    readers: dict[type, list[Reader]] = {}
    for detector in detectors:
        slot = timed.index(detector) if detector in timed else -1
        for seen in detector.reads:
            readers.setdefault(seen, []).append((detector, detector.observe, slot))
    return readers
