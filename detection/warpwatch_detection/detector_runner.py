"""Runs all detectors at once: each gets what it reads, and is asked when its deadline is due.

A detector that raises does not affect the others; the error is counted, and the detector is not
asked for the same deadline again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from warpwatch_detection.detector import NEVER, Detector, DetectorResult, Observation, Results
from warpwatch_telemetry.jobs import JobId

# A kind, its detector's ``observe``, and its place in the deadlines (-1 without one).
Reader = tuple[str, Callable[[Observation], Results], int]
# The results of detectors in the order in which they were asked, each with its kind.
KindResults = list[tuple[str, DetectorResult]]


class DetectorRunner:
    """Turns observations and the passing of time into results.

    deadline: the earliest of all detectors. failures: errors of detectors, by kind.
    """

    def __init__(self, detectors: Sequence[Detector]) -> None:
        self.detectors = detectors
        self.failures: Counter[str] = Counter()
        self.deadline = NEVER
        self._timed = [one for one in detectors if one.waits]
        self._states: list[Any] = []
        # By place in ``_timed``; NEVER for a deadline at which the detector failed.
        self._deadlines: list[float] = []
        self._failed: dict[int, float] = {}
        # By type of observation.
        self._readers: dict[type, list[Reader]] = {}
        for detector in detectors:
            place = self._timed.index(detector) if detector.waits else -1
            for seen in detector.reads:
                reader = (detector.kind, detector.observe, place)
                self._readers.setdefault(seen, []).append(reader)
        self._failure: Exception | None = None
        self.read_deadlines()

    def observe(self, seen: Observation) -> KindResults:
        """Return the results of all detectors that read the observation's type."""
        found: KindResults = []
        for kind, observe, place in self._readers.get(type(seen), ()):
            try:
                if results := observe(seen):
                    found += [(kind, one) for one in results]
            except Exception as error:
                self._fail(kind, error)
            if place >= 0 and self._states[place].deadline != self._deadlines[place]:
                self.read_deadlines()
        return found

    def expire(self, now: float, put_off: Callable[[float], float]) -> KindResults:
        """Return the results of detectors that are due. put_off: delays a deadline."""
        found: KindResults = []
        for place, detector in enumerate(self._timed):
            if put_off(self._deadlines[place]) > now:
                continue
            due = detector.state.deadline
            try:
                found += [(detector.kind, one) for one in detector.expire(now)]
            except Exception as error:
                self._failed[place] = due
                self._fail(detector.kind, error)
        self.read_deadlines()
        return found

    def forget(self, job: JobId) -> None:
        for detector in self.detectors:
            try:
                detector.forget(job)
            except Exception as error:
                self._fail(detector.kind, error)
        self.read_deadlines()

    def read_deadlines(self) -> None:
        """Read the deadlines again after states were changed or replaced."""
        self._states = [detector.state for detector in self._timed]
        deadlines = enumerate(state.deadline for state in self._states)
        failed = self._failed
        self._deadlines = [NEVER if failed.get(place) == due else due for place, due in deadlines]
        self.deadline = min(self._deadlines, default=NEVER)

    def pop_failure(self) -> Exception | None:
        """Return the first error that a detector raised since the last call."""
        failure, self._failure = self._failure, None
        return failure

    def _fail(self, kind: str, error: Exception) -> None:
        self.failures[kind] += 1
        self._failure = self._failure or error
