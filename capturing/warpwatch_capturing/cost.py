"""Measures the cost of a capture: the job's step time before, during and after it."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from warpwatch_capturing.session import CaptureSession
from warpwatch_telemetry.captures import STEP_KINDS, Capture, Residual
from warpwatch_telemetry.jobs import JobId
from warpwatch_telemetry.records import Step

BASELINE_STEPS = 30
AFTER_STEPS = 20
# With fewer steps on either side a residual is not computed.
MIN_STEPS = 10
# The job is slower since: this much, and more than chance explains (one-sided p < 0.001).
RESIDUAL_RATIO = 1.05
SIGNIFICANT_Z = 3.1
# How long the steps after a capture are waited for before its price is written down.
MIN_COST_TIMEOUT_S = 60.0
MAX_COST_TIMEOUT_S = 1800.0


class StepCost:
    """Fed with the steps of one rank of the job, in order; ``before_s``: its steps until now.

    disturbs: the trace is recorded, exported or compressed, which takes the job's processors.
    """

    def __init__(self, before_s: Iterable[float] = ()) -> None:
        self._before_s = list(before_s)
        self._during_s: list[float] = []
        self._paid_s: list[float] = []
        self._after_s: list[float] = []
        self._delivered = self._straddles = self._interrupted = self._serves = False

    @property
    def disturbs(self) -> bool:
        return bool(self._paid_s) and not self._delivered

    def deliver(self) -> None:
        """Count steps that begin from now on as after the capture: its files are there."""
        self._delivered = self._straddles = True

    def add(self, step: Step, first_step: int, last_step: int) -> None:
        """Count a step. Steps ``first_step`` to ``last_step`` are recorded."""
        if self.complete:
            return
        self._serves |= bool(step.work_class)
        if not step.profiled:
            if self._delivered and not self._straddles:
                self._after_s.append(step.duration_s)
            # The first one to end began before.
            self._straddles = False
        elif step.step > last_step + 1:
            # Another capture: the steps from here on are not this one's doing.
            self._interrupted = True
        else:
            self._paid_s.append(step.duration_s)
            if first_step <= step.step <= last_step:
                self._during_s.append(step.duration_s)

    @property
    def complete(self) -> bool:
        return self._interrupted or len(self._after_s) >= AFTER_STEPS

    def medians(self) -> dict[str, float]:
        """Return the seconds ``before``, ``during`` and ``after``, as far as known."""
        parts = {"before": self._before_s, "during": self._during_s, "after": self._after_s}
        return {name: statistics.median(steps_s) for name, steps_s in parts.items() if steps_s}

    def cost_s(self) -> float | None:
        """Return the extra time of the starting, recorded and stopping steps, or None."""
        if not self._before_s or not self._paid_s:
            return None
        return sum(self._paid_s) - len(self._paid_s) * statistics.median(self._before_s)

    def residual(self) -> Residual | None:
        """Return the residual, or None if there are too few steps on one side.

        A server's iterations follow its load: none of it is the capture's doing.
        """
        steps = min(len(self._before_s), len(self._after_s))
        before_s = statistics.median(self._before_s) if self._before_s else 0.0
        if steps < MIN_STEPS or before_s <= 0 or self._serves:
            return None
        ratio = statistics.median(self._after_s) / before_s
        sure = rank_sum_z(self._before_s, self._after_s) > SIGNIFICANT_Z
        return Residual(ratio, steps, sure and ratio > RESIDUAL_RATIO)


@dataclass(slots=True)
class _Watched:
    """The cost of one capture, while its steps are awaited.

    rank: the one whose steps are compared. since: when the capture ended, monotonic.
    """

    session: CaptureSession
    rank: int
    cost: StepCost
    timeout_s: float
    since: float | None = None


class CostWatch:
    """Follows the steps of all ranks, and prices the captures among them."""

    def __init__(self) -> None:
        # By job and rank: the newest steps that no capture disturbed, in seconds.
        self._undisturbed_s: dict[tuple[JobId, int], deque[float]] = {}
        self._watched: dict[str, _Watched] = {}

    def begin(self, session: CaptureSession, rank: int) -> None:
        """Follow a capture that starts; ``rank``: the one that is compared."""
        capture = session.capture
        if capture.request.kind not in STEP_KINDS:
            return
        before_s = self._undisturbed_s.get((capture.request.job_id, rank), ())
        # Twice what the steps after it should take.
        wait_s = 2 * AFTER_STEPS * max(before_s, default=0.0)
        timeout_s = min(max(MIN_COST_TIMEOUT_S, wait_s), MAX_COST_TIMEOUT_S)
        self._watched[capture.id] = _Watched(session, rank, StepCost(before_s), timeout_s)

    def observe(self, step: Step) -> None:
        is_disturbed = step.profiled or any(
            watched.cost.disturbs and watched.session.capture.request.job_id == step.job_id
            for watched in self._watched.values()
        )
        if not is_disturbed:
            new: deque[float] = deque(maxlen=BASELINE_STEPS)
            steps_s = self._undisturbed_s.setdefault((step.job_id, step.rank), new)
            steps_s.append(step.duration_s)
        for watched in self._watched.values():
            capture = watched.session.capture
            if (step.job_id, step.rank) == (capture.request.job_id, watched.rank):
                first = capture.start_step or 0
                watched.cost.add(step, first, first + (capture.steps or 0) - 1)

    def forget_rank(self, job: JobId, rank: int | None) -> None:
        """Forget a rank that has ended; None for all of the job."""
        kept = self._undisturbed_s
        for key in [key for key in kept if key[0] == job and rank in (None, key[1])]:
            del kept[key]

    def end(self, capture_id: str, at: float) -> None:
        """Count the steps from now on, monotonic, as after the capture."""
        if capture_id in self._watched:
            watched = self._watched[capture_id]
            watched.since = at
            watched.cost.deliver()

    def forget(self, capture_id: str) -> None:
        self._watched.pop(capture_id, None)

    def awaits(self, capture_id: str) -> bool:
        """Return whether the capture's price is not known yet."""
        return capture_id in self._watched

    def pop_priced(self, at: float) -> list[tuple[Capture, StepCost]]:
        """Return the ended captures whose later steps have arrived, or are overdue."""
        done = [
            watched
            for watched in self._watched.values()
            if watched.since is not None
            and (watched.cost.complete or at - watched.since >= watched.timeout_s)
        ]
        for watched in done:
            del self._watched[watched.session.capture.id]
        return [(watched.session.capture, watched.cost) for watched in done]


def rank_sum_z(before: Sequence[float], after: Sequence[float]) -> float:
    """Return the z of Mann and Whitney's U test: how surely ``after`` is larger.

    Normal approximation without correction for ties (Mann and Whitney 1947), good from about
    ten values a side.
    """
    larger = sum((b > a) + (b == a) / 2 for a in before for b in after)
    pairs = len(before) * len(after)
    return (larger - pairs / 2) / math.sqrt(pairs * (len(before) + len(after) + 1) / 12)
