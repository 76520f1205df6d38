"""One capture while it runs: prepared and armed at all participants, tried again, followed."""

from __future__ import annotations

import logging
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from warpwatch_capturing.participant import Participant, fastest, steps_ahead
from warpwatch_capturing.policy import Plan
from warpwatch_telemetry.captures import STEP_KINDS, Capture, CaptureRequest, Prepared, RankCapture
from warpwatch_telemetry.errors import Refused

logger = logging.getLogger(__name__)

# If not all ranks arm in time, at most this many start steps are tried.
ATTEMPTS = 3
# Answers to ``arm`` that another start step can avoid.
_AVOIDABLE = frozenset({"refused_over", "refused_busy"})
# Ranks that have recorded: another attempt would discard it.
_EXPORTED = frozenset({"exported", "written"})


class CaptureSession:
    """A capture that runs. Not thread-safe; ``at`` is monotonic.

    ``plan`` returns what is recorded of a request, given the job's step seconds. A capture that
    has a ``start_step`` keeps it: other nodes have the same.
    """

    def __init__(
        self,
        capture: Capture,
        participants: Sequence[Participant],
        plan: Callable[[CaptureRequest, float], Plan],
        at: float,
    ) -> None:
        self.capture = capture
        self.participants = participants
        self.begun_at = at
        self._plan = plan
        self._is_fixed = capture.start_step is not None
        self._attempt = 0
        self._phase = "new"
        self._asked_at = at
        self._resume_at = at
        self._refusals = ""

    @property
    def ranks(self) -> dict[int, RankCapture]:
        """All ranks by number, as they are now."""
        found = {number: rank for one in self.participants for number, rank in one.ranks.items()}
        return dict(sorted(found.items()))

    def shown(self) -> Capture:
        """Return the capture as it is now."""
        times = [one.recording_time for one in self.participants if one.recording_time is not None]
        ranks = tuple(self.ranks.values())
        return replace(self.capture, ranks=ranks, recording_time=min(times, default=None))

    def begin(self, at: float) -> None:
        """Send the first requests. Raises Refused if a participant refuses at once."""
        if self.capture.request.kind in STEP_KINDS:
            self._prepare(at)
        else:
            self._arm(at)
        self._go_on(at)

    def advance(self, at: float) -> bool:
        """Return whether the capture is over. Raises Refused if it was refused meanwhile."""
        for one in self.participants:
            one.advance(at)
        if self._phase == "paused" and at >= self._resume_at and not self._is_awaited():
            self._prepare(at)
        self._go_on(at)
        if self._phase == "following" and self._must_try_again(at):
            self._try_again(at)
        return self._phase == "following" and all(one.is_over for one in self.participants)

    def cancel(self, detail: str = "") -> None:
        """Stop waiting for all ranks, and make those ``missing`` that have not ended."""
        for one in self.participants:
            try:
                one.cancel(detail)
            except Exception:
                logger.exception("capture %s", self.capture.id)

    # --- the phases ---

    def _present(self) -> Iterator[Participant]:
        return (one for one in self.participants if not one.lost)

    def _prepare(self, at: float) -> None:
        self._attempt += 1
        self._asked_at = at
        self._phase = "preparing"
        for one in self._present():
            one.prepare(self.capture.request, at)

    def _go_on(self, at: float) -> None:
        """Start the next phase once all participants have answered. Raises Refused."""
        if self._phase == "preparing" and not self._is_awaited():
            self._choose_start(at)
            self._arm(at)
        if self._phase == "arming" and not self._is_awaited():
            self._phase = "following"
            self._refusals = self._refused_to_arm()
            if self._refusals and self._attempt >= ATTEMPTS:
                self._give_up("failed", f"not armed in {ATTEMPTS} tries: {self._refusals}")

    def _is_awaited(self) -> bool:
        return any(one.is_awaited for one in self.participants)

    def _choose_start(self, at: float) -> None:
        """Set the steps and the start step of this attempt. Raises Refused."""
        ready = []
        for one in self._present():
            if isinstance(one.answer, Refused):
                self._give_up(one.answer.reason, _from_node(one, one.answer))
            if isinstance(one.answer, Prepared):
                ready.append(one.answer)
            else:
                one.lose(str(one.answer))
        if not ready:
            lost = "; ".join(f"{one.node}: {one.lost}" for one in self.participants)
            self._give_up("failed", lost)
        step_s = statistics.median(one.step_s or 0.0 for one in ready)
        begun = fastest(one.begun or 0 for one in ready)
        start = self.capture.start_step
        if start is None or not self._is_fixed:
            reach = self.participants[0].reach
            start = begun + steps_ahead(reach, self._attempt, at - self._asked_at, step_s)
        elif begun >= start - 1:
            # The step before it starts the profiler.
            detail = f"step {start} is too early: step {begun} has begun"
            self._give_up("refused_over", detail)
        plan = self._plan(self.capture.request, step_s)
        steps = min([plan.steps, *(one.steps or plan.steps for one in ready)])
        self.capture = replace(
            self.capture,
            request=plan.request,
            steps=steps,
            start_step=start,
            expected_cost_s=plan.cost_s,
        )

    def _arm(self, at: float) -> None:
        self._phase = "arming"
        for one in self._present():
            one.arm(self.capture, max(1, self._attempt), at)

    def _refused_to_arm(self) -> str:
        """Return which participants another start step may convince. Raises Refused."""
        refusals = []
        for one in self._present():
            if not isinstance(one.answer, Exception):
                continue
            if self.capture.request.kind not in STEP_KINDS:
                one.lose(str(one.answer))
            elif isinstance(one.answer, Refused) and one.answer.reason not in _AVOIDABLE:
                self._give_up(one.answer.reason, _from_node(one, one.answer))
            else:
                refusals.append(_from_node(one, one.answer))
        return "; ".join(refusals)

    def _must_try_again(self, at: float) -> bool:
        """Return whether a rank cannot record the start step, and none has a trace yet."""
        start = self.capture.start_step
        if self._refusals:
            return True
        if start is None or self._is_fixed or self._attempt >= ATTEMPTS:
            return False
        states = {rank.state for one in self._present() for rank in one.ranks.values()}
        if states & _EXPORTED:
            return False
        return "late" in states or any(
            rank.state == "asked" and one.has_passed(rank.rank, start, at)
            for one in self._present()
            for rank in one.ranks.values()
        )

    def _try_again(self, at: float) -> None:
        for one in self._present():
            one.withdraw()
        self._refusals = ""
        self._phase = "paused"
        self._resume_at = at + random.uniform(*self.participants[0].reach.pause_s)
        if at >= self._resume_at and not self._is_awaited():
            self._prepare(at)
            self._go_on(at)

    def _give_up(self, reason: str, detail: str) -> None:
        """Cancel all participants. Raises Refused."""
        for one in self._present():
            one.withdraw()
        raise Refused(reason, detail)


def _from_node(one: Participant, answer: Exception) -> str:
    return str(answer) if one.node is None else f"{one.node}: {answer}"
