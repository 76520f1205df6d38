"""What a detector is: records in, verdicts out, no clock but the records' own time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from warpwatch.telemetry.anomalies import Severity
from warpwatch.telemetry.records import Record

# ``deadline`` of a detector that waits for nothing.
NEVER = float("inf")


@dataclass(frozen=True, slots=True)
class JobStep:
    """One step of all ranks of a job that this daemon sees. Seconds; ``index`` counts from 0.

    Steps that a capture touched are left out, declared pauses (checkpoint, eval) are taken off.
    compute_s: per rank, duration less comm, data_wait and pauses: what the rank itself works.
    data_wait_s: per rank, waiting for input.
    duration_s: median over the ranks.
    common_s: median compute + smallest comm: the step as it would be without one rank's delay.
    """

    time: float
    job: str
    step: int
    index: int
    duration_s: float
    common_s: float
    compute_s: Mapping[int, float]
    data_wait_s: Mapping[int, float]


Observation = Record | JobStep


@dataclass(frozen=True, slots=True)
class Found:
    """Something is wrong. Repeated while it lasts; fields mean what they mean in an Anomaly."""

    time: float
    severity: Severity
    summary: str
    job: str | None = None
    rank: int | None = None
    device: str | None = None
    step: int | None = None
    begin_step: int | None = None
    value: float | None = None
    baseline: float | None = None


@dataclass(frozen=True, slots=True)
class Fine:
    """What was found about the job or device is over."""

    time: float
    job: str | None = None
    device: str | None = None


# No verdict means: nothing new, or not enough data.
Verdict = Found | Fine


class Detector(Protocol):
    kind: str

    @property
    def reads(self) -> tuple[type, ...]:
        """The only types that ``observe`` is called with."""

    def observe(self, seen: Observation) -> Iterable[Verdict]: ...

    def deadline(self) -> float:
        """The earliest time at which ``expire`` may have something to say."""

    def expire(self, now: float) -> Iterable[Verdict]:
        """Called with ``now`` equal to the deadline; a later ``deadline`` must follow."""

    def forget(self, job: str) -> None:
        """The job is over: its memory can go."""


class Timeless:
    """A detector that decides on what it sees and never on silence."""

    def deadline(self) -> float:
        return NEVER

    def expire(self, now: float) -> Iterable[Verdict]:
        return ()
