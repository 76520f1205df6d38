"""Captures by the shim in the process: what each rank is asked and answers, and when it ends."""

from __future__ import annotations

import logging
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from warpwatch.protocol import MAX_ARM_TIMEOUT_S
from warpwatch_capturing.children.verification import Expectation
from warpwatch_capturing.config import TriggersConfig
from warpwatch_capturing.session import CaptureSession, FetchError, fastest, is_over, median_step_s
from warpwatch_daemon.participants.stacks import outside
from warpwatch_daemon.ranks import inbox
from warpwatch_daemon.ranks.rank import Rank
from warpwatch_daemon.ranks.ring_folder import RingFolder
from warpwatch_telemetry.captures import (
    CAPTURE_TIMEOUT_S,
    RANK_ENDS,
    STEP_KINDS,
    Capture,
    RankCapture,
)
from warpwatch_telemetry.records import End, RankEvent

logger = logging.getLogger(__name__)

# A rank must read its command before the start step: this long, and at least two steps.
MARGIN_S = 0.15
MARGIN_STEPS = 2
# Not all armed in time: another start step, this often at most in all.
ATTEMPTS = 3
# The start step is two steps off, and as much again for a rank that is behind.
ARM_STEPS = 4
# However long a ring says that its steps are, and however often ranks are asked again.
MAX_RECORDING_S = 3600.0
MAX_SESSION_S = 2 * 3600.0
# A helper thread answers within its heartbeat; one without a heartbeat for SILENT_S does not.
STACKS_TIMEOUT_S = 10.0
SILENT_S = 5.0
# What a process chooses of its files' names, for no other user to foretell.
_TOKEN = re.compile("[0-9a-f]{16}")


@dataclass(frozen=True, slots=True)
class AskedRank:
    """A rank, the ring of the process that was asked, and the folder that it lies in."""

    rank: Rank
    ring_name: str
    owner_uid: int
    folder: RingFolder


class ShimSession(CaptureSession):
    """``targets``: those of the ranks ``numbers`` that have not ended. ``send`` writes a rank's
    command file; ``begun`` reads the step that a rank has begun. A capture that has its
    ``start_step`` keeps it: other nodes have the same.
    """

    def __init__(
        self,
        capture: Capture,
        numbers: Sequence[int],
        targets: dict[int, AskedRank],
        config: TriggersConfig,
        send: Callable[[AskedRank, dict[str, Any]], None],
        begun: Callable[[Rank], int | None],
        at: float,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(capture, numbers)
        self.targets = targets
        for number in self.ranks.keys() - targets.keys():
            self.ranks[number] = RankCapture(number, "missing", "the process ended")
        self._config = config
        self._send = send
        self._begun = begun
        self._monotonic = monotonic
        self._steps = capture.steps or capture.request.steps
        self._fixed_start = capture.start_step
        self._attempt = 0
        self._deadline = at + MAX_SESSION_S
        self._recording_at: float | None = None
        self._silent: set[int] = set()
        # By rank, what the answer says of its files' names.
        self._answers: dict[int, Mapping[str, Any]] = {}
        self._outside_deadline: float | None = None
        self._ask(at)

    # --- what is said to the ranks ---

    @property
    def command_id(self) -> str:
        """The id of this attempt: answers to an earlier one are not mistaken for this one's."""
        return f"{self.capture.id}-{self._attempt}"

    def _ask(self, at: float) -> None:
        self._attempt += 1
        self._asked_at = at
        self._arm_timeout_s = min(
            max(self._config.arm_timeout_s, ARM_STEPS * self._step_s(max)), MAX_ARM_TIMEOUT_S
        )
        request = self.capture.request
        start = self._start_step() if request.kind in STEP_KINDS else None
        self.capture = replace(self.capture, start_step=start, recording_time=None)
        self._recording_at = None
        command = {
            "op": "capture",
            "id": self.command_id,
            "kind": request.kind,
            "start_step": start or 0,
            "steps": self._steps,
            "options": list(request.options),
            "arm_timeout_s": self._arm_timeout_s,
        }
        for number, rank in self.ranks.items():
            if rank.state not in RANK_ENDS or rank.state == "late":
                self.ranks[number] = RankCapture(number)
                self._send(self.targets[number], command)

    def _start_step(self) -> int:
        """The newest begun step of the fastest rank, and the margin; wider at each attempt."""
        if self._fixed_start is not None:
            return self._fixed_start
        step_s = self._step_s(min)
        margin_s = MARGIN_S * 2 ** (self._attempt - 1)
        in_time = math.ceil(margin_s / step_s) if step_s else 0
        begun = fastest(self._begun(target.rank) or 0 for target in self.targets.values())
        return begun + max(MARGIN_STEPS, in_time)

    def _step_s(self, choose: Callable[[list[float]], float]) -> float:
        return median_step_s((target.rank for target in self.targets.values()), choose)

    def _withdraw(self, rank: RankCapture) -> None:
        if rank.state in ("missing", "late") and rank.rank in self.targets:
            self._send(self.targets[rank.rank], {"op": "cancel", "id": self.command_id})

    # --- what the ranks answer ---

    def observe(self, event: RankEvent | End, at: float) -> None:
        number = event.rank
        rank = None if number is None else self.ranks.get(number)
        if rank is None or event.job_id != self.capture.request.job_id or rank.state in RANK_ENDS:
            return
        if isinstance(event, End) or event.event == "died":
            if rank.state != "exported":
                how = "ended" if isinstance(event, End) else "died"
                detail = f"the process {how} {_WHEN[rank.state]}"
                self.ranks[rank.rank] = replace(rank, state="missing", detail=detail)
        elif event.detail.get("id") == self.command_id:
            self.ranks[event.rank] = _answered(rank, event)
            self._answers[event.rank] = event.detail
            if event.event == "capture_started" and self._recording_at is None:
                self._recording_at = at
                self.capture = replace(self.capture, recording_time=event.time)

    # --- time passes ---

    def advance(self, at: float) -> bool:
        if self._must_rename():
            self._ask(at)
        for number, rank in self.ranks.items():
            overdue = "" if is_over(rank) else self._overdue(rank, at)
            if overdue:
                self.ranks[number] = replace(rank, state="missing", detail=overdue)
        return all(is_over(rank) for rank in self.ranks.values())

    def _must_rename(self) -> bool:
        """A rank was late or passed the start step unheard, and none has a trace yet."""
        can_wait = self.capture.request.kind in STEP_KINDS and self._fixed_start is None
        if not can_wait or self._attempt >= ATTEMPTS:
            return False
        states = {rank.state for rank in self.ranks.values()}
        if "exported" in states:
            return False
        return "late" in states or any(map(self._has_passed, self.ranks.values()))

    def _has_passed(self, rank: RankCapture) -> bool:
        """A rank that is behind may still arm, at the border of the step before the start."""
        if rank.state != "asked" or self.capture.start_step is None:
            return False
        return (self._begun(self.targets[rank.rank].rank) or 0) >= self.capture.start_step

    def _overdue(self, rank: RankCapture, at: float) -> str:
        waited_s, process = at - self._asked_at, self.targets[rank.rank].rank
        if self.capture.request.kind == "stacks":
            silent = process.status == "stopped" or process.silence.lasts_s(at) >= SILENT_S
            if silent:
                self._silent.add(rank.rank)
            limit_s = outside.ANSWER_S if silent else STACKS_TIMEOUT_S
            return f"no answer within {waited_s:.0f} s" if waited_s >= limit_s else ""
        if at >= self._deadline:
            return f"not done within {MAX_SESSION_S:.0f} s"
        if rank.state in ("asked", "armed"):
            over = waited_s >= self._arm_timeout_s
            stopped = ": the process is stopped" if process.status == "stopped" else ""
            step = self.capture.start_step
            return f"step {step} not begun within {waited_s:.0f} s{stopped}" if over else ""
        since = self._asked_at if self._recording_at is None else self._recording_at
        # The recorded steps take their time, and twice that under the profiler.
        steps_s = min(2 * (self._steps + 1) * self._step_s(max), MAX_RECORDING_S)
        over = at - since >= max(CAPTURE_TIMEOUT_S, steps_s)
        return f"no file within {at - since:.0f} s of recording" if over else ""

    # --- what they leave ---

    def _taken(self, rank: RankCapture, folder: Path) -> tuple[RankCapture, tuple[str, ...]]:
        number, kind = rank.rank, self.capture.request.kind
        if rank.detail == "no_inbox":
            remedy = self.targets[number].folder.inbox_remedy
            return replace(rank, detail=f"no_inbox: {remedy}"), ()
        if rank.state == "missing" and number in self._silent:
            return self._take_from_outside(number, folder)
        if rank.state != "exported":
            return rank, ()
        if kind not in inbox.SUFFIX:
            # Its own tool writes the file: Nsight Systems, to where its command line says.
            return replace(rank, state="written"), ()
        # Of the allocator's snapshot, which came first, the answer calls the rest ``more``.
        field = "more" if kind == "memory" else "token"
        name = self._take(number, field, inbox.SUFFIX[kind], folder)
        return replace(rank, state="written", file=name), (name, *self._take_more(number, folder))

    def _take_from_outside(self, number: int, folder: Path) -> tuple[RankCapture, tuple[str, ...]]:
        """The stacks of a rank that cannot answer; all ranks together have WAIT_S for theirs."""
        if self._outside_deadline is None:
            self._outside_deadline = self._monotonic() + outside.WAIT_S
        rank, target = self.ranks[number], self.targets[number]
        name = f"rank{number}{inbox.SUFFIX['stacks']}"
        try:
            silent = outside.look(target.rank, target.ring_name)
            via = outside.take(
                silent,
                target.folder.inbox,
                folder / name,
                self._outside_deadline,
                monotonic=self._monotonic,
            )
        except outside.NoStacks as error:
            return replace(rank, detail=str(error)), ()
        return replace(rank, state="written", file=name, detail=f"taken by {via}"), (name,)

    def _take(self, number: int, field: str, suffix: str, folder: Path) -> str:
        target, name = self.targets[number], f"rank{number}{suffix}"
        token = self._answers.get(number, {}).get(field)
        if not isinstance(token, str) or not _TOKEN.fullmatch(token):
            raise FetchError(f"the answer has no {field} of a file")
        source = f"{self.command_id}.{target.ring_name.removesuffix('.ring')}.{token}{suffix}"
        inbox.take(target.folder.inbox, source, target.owner_uid, folder / name)
        return name

    def _take_more(self, number: int, folder: Path) -> list[str]:
        """What may come beside the file; where it does not, nothing is missing."""
        suffix = inbox.MORE_SUFFIX.get(self.capture.request.kind)
        if suffix is None:
            return []
        try:
            return [self._take(number, "token", suffix, folder)]
        except (FetchError, OSError) as error:
            logger.debug("capture %s: %s", self.capture.id, error)
            return []

    def expectation(self, number: int) -> Expectation | None:
        start = self.capture.start_step
        if self.capture.request.kind != "torch" or start is None:
            return None
        on_gpu = self.targets[number].rank.claims.device is not None
        return Expectation(number, start, start + self._steps - 1, on_gpu=on_gpu)


_STATE = {
    "capture_armed": "armed",
    "capture_late": "late",
    "capture_started": "recording",
    "capture_finished": "exported",
    "capture_failed": "failed",
    "capture_disarmed": "failed",
}
_STEPS = ("first_step", "last_step")
_WHEN = {
    "asked": "before it answered",
    "armed": "while armed",
    "recording": "while recording",
}


def _answered(rank: RankCapture, event: RankEvent) -> RankCapture:
    state = _STATE.get(event.event)
    if state is None:
        return rank
    return replace(
        rank,
        state=state,
        detail=str(event.detail.get("detail", "")),
        **{name: event.detail[name] for name in _STEPS if isinstance(event.detail.get(name), int)},
    )
