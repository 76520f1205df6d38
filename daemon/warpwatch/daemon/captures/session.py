"""One capture while it runs: what each rank was told, what it answered, and when it is over."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from warpwatch.daemon.captures.cost import StepCost
from warpwatch.daemon.config import TriggersConfig
from warpwatch.daemon.rendezvous.inbox import SUFFIX
from warpwatch.daemon.rendezvous.rank import Rank
from warpwatch.telemetry.captures import RANK_ENDS, Capture, RankCapture
from warpwatch.telemetry.records import End, RankEvent, Step

# A rank must read its command before the start step: this long, and at least two steps.
MARGIN_S = 0.15
MARGIN_STEPS = 2
# Not all armed in time: another start step, this often at most in all.
ATTEMPTS = 3
# A helper thread answers within its heartbeat; a stopped process never does.
STACKS_TIMEOUT_S = 15.0


@dataclass(frozen=True, slots=True)
class Target:
    """A rank and the ring of the process that was asked."""

    rank: Rank
    ring_name: str
    owner_uid: int


class Session:
    """``send`` writes a rank's command file; ``begun`` reads the step that a rank has begun.

    ``at`` is monotonic.
    """

    def __init__(
        self,
        capture: Capture,
        targets: dict[int, Target],
        config: TriggersConfig,
        send: Callable[[Target, dict[str, Any]], None],
        begun: Callable[[Rank], int | None],
        at: float,
    ) -> None:
        self.capture = capture
        self.targets = targets
        self._config = config
        self._send = send
        self._begun = begun
        self._attempt = 0
        self._asked_at = at
        self._recording_at: float | None = None
        self.ranks = {number: RankCapture(number) for number in targets}
        self._ask(at)

    # --- what is said to the ranks ---

    @property
    def command_id(self) -> str:
        """The id of this attempt: answers to an earlier one are not mistaken for this one's."""
        return f"{self.capture.id}-{self._attempt}"

    def file_name(self, number: int) -> str:
        """The file that the rank leaves in the inbox."""
        ring = self.targets[number].ring_name.removesuffix(".ring")
        return f"{self.command_id}.{ring}{SUFFIX[self.capture.request.kind]}"

    def _ask(self, at: float) -> None:
        self._attempt += 1
        request = self.capture.request
        start = self._start_step() if request.kind == "torch" else None
        self.capture = replace(self.capture, start_step=start, recording_time=None)
        self._recording_at = None
        self.cost = StepCost(tuple(self._cost_rank().recent))
        command = {
            "op": "capture",
            "id": self.command_id,
            "kind": request.kind,
            "start_step": start or 0,
            "steps": request.steps,
            "arm_timeout_s": max(1.0, self._asked_at + self._config.arm_timeout_s - at),
        }
        for number, rank in self.ranks.items():
            if rank.state not in RANK_ENDS or rank.state == "late":
                self.ranks[number] = RankCapture(number)
                self._send(self.targets[number], command)

    def _start_step(self) -> int:
        """The newest begun step of the fastest rank, and the margin; wider at each attempt."""
        step_s = self._step_s(min)
        margin_s = MARGIN_S * 2 ** (self._attempt - 1)
        in_time = math.ceil(margin_s / step_s) if step_s else 0
        return self._fastest() + max(MARGIN_STEPS, in_time)

    def _step_s(self, choose: Callable[[list[float]], float]) -> float:
        """The median step seconds of the fastest (min) or slowest (max) rank; 0: not known."""
        recent = [target.rank.recent for target in self.targets.values() if target.rank.recent]
        return choose([statistics.median(durations_s) for durations_s in recent] or [0.0])

    def _fastest(self) -> int:
        return max((self._begun(target.rank) or 0) for target in self.targets.values())

    def cancel(self) -> None:
        """Tell every rank that brought nothing that nobody waits for it any more."""
        for number, rank in self.ranks.items():
            if rank.state in ("missing", "late"):
                self._send(self.targets[number], {"op": "cancel", "id": self.command_id})

    # --- what the ranks answer ---

    def observe(self, event: RankEvent | End, at: float) -> None:
        number = event.rank
        rank = None if number is None else self.ranks.get(number)
        if rank is None or event.job != self.capture.request.job or rank.state in RANK_ENDS:
            return
        if isinstance(event, End) or event.event == "died":
            if rank.state != "exported":
                how = "ended" if isinstance(event, End) else "died"
                detail = f"the process {how}"
                self.ranks[rank.rank] = replace(rank, state="missing", detail=detail)
        elif event.detail.get("id") == self.command_id:
            self.ranks[event.rank] = _answered(rank, event)
            if event.event == "capture_started" and self._recording_at is None:
                self._recording_at = at
                self.capture = replace(self.capture, recording_time=event.time)

    def observe_step(self, step: Step) -> None:
        request = self.capture.request
        start = self.capture.start_step
        if start is not None and step.job == request.job and step.rank == self._cost_rank().rank:
            self.cost.add(step, start, start + request.steps - 1)

    def _cost_rank(self) -> Rank:
        return self.targets[min(self.targets)].rank

    # --- time passes ---

    def advance(self, at: float) -> bool:
        """True when every rank has ended or left its file."""
        if self._must_rename():
            self._ask(at)
        for number, rank in self.ranks.items():
            if rank.state not in RANK_ENDS and rank.state != "exported":
                late = self._overdue(rank, at)
                if late:
                    self.ranks[number] = replace(rank, state="missing", detail=late)
        return all(r.state in RANK_ENDS or r.state == "exported" for r in self.ranks.values())

    def _must_rename(self) -> bool:
        """Not all armed before the start step, and nobody has a trace yet."""
        if self.capture.request.kind != "torch" or self._attempt >= ATTEMPTS:
            return False
        states = [rank.state for rank in self.ranks.values()]
        if "exported" in states:
            return False
        if "late" in states:
            return True
        start = self.capture.start_step or 0
        return "asked" in states and self._fastest() >= start - 1

    def _overdue(self, rank: RankCapture, at: float) -> str:
        waited_s = at - self._asked_at
        if self.capture.request.kind == "stacks":
            over = waited_s >= STACKS_TIMEOUT_S
            return f"no answer within {STACKS_TIMEOUT_S:.0f} s" if over else ""
        if rank.state in ("asked", "armed"):
            over = waited_s >= self._config.arm_timeout_s
            step = self.capture.start_step
            return f"step {step} not begun within {waited_s:.0f} s" if over else ""
        since = self._asked_at if self._recording_at is None else self._recording_at
        # The recorded steps take their time, and twice that under the profiler.
        steps_s = 2 * (self.capture.request.steps + 1) * self._step_s(max)
        over = at - since >= max(self._config.capture_timeout_s, steps_s)
        return f"no file within {at - since:.0f} s of recording" if over else ""


_STATE = {
    "capture_armed": "armed",
    "capture_late": "late",
    "capture_started": "recording",
    "capture_finished": "exported",
    "capture_failed": "failed",
    "capture_disarmed": "failed",
}


def _answered(rank: RankCapture, event: RankEvent) -> RankCapture:
    state = _STATE.get(event.event)
    if state is None:
        return rank
    return replace(
        rank,
        state=state,
        detail=str(event.detail.get("detail", "")),
        first_step=_integer(event.detail.get("first_step"), rank.first_step),
        last_step=_integer(event.detail.get("last_step"), rank.last_step),
    )


def _integer(value: Any, default: int | None) -> int | None:
    return value if isinstance(value, int) else default
