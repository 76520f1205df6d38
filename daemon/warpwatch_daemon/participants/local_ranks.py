"""The ranks of this node as participants: commands to the shim, its answers, its files."""

from __future__ import annotations

import contextlib
import logging
import re
import statistics
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from warpwatch.protocol import MAX_ARM_TIMEOUT_S
from warpwatch_capturing.participant import (
    Collected,
    FetchError,
    LiveJob,
    Participant,
    Reach,
    RunningRank,
    fastest,
    is_over,
)
from warpwatch_capturing.policy import Policy
from warpwatch_capturing.verification import Expectation
from warpwatch_daemon.participants import stacks
from warpwatch_daemon.ranks import inbox
from warpwatch_daemon.ranks.folder import RingFolder
from warpwatch_daemon.ranks.rank import Rank
from warpwatch_daemon.ranks.source import RanksSource
from warpwatch_runtime.quantities import no_step
from warpwatch_telemetry.captures import (
    CAPTURE_TIMEOUT_S,
    RANK_ENDS,
    STEP_KINDS,
    Capture,
    CaptureRequest,
    Prepared,
    RankCapture,
)
from warpwatch_telemetry.errors import Refused
from warpwatch_telemetry.jobs import JobId
from warpwatch_telemetry.records import End, RankEvent

logger = logging.getLogger(__name__)

# A rank needs this time and two steps to read its command before the start step.
MARGIN_S = 0.15
MARGIN_STEPS = 2
# The start step is two steps off, and as much again for a rank that is behind.
ARM_STEPS = 4
# Limits for rings that claim long steps, and for ranks that are asked again and again.
MAX_RECORDING_S = 3600.0
MAX_CAPTURE_S = 2 * 3600.0
# A helper thread answers within its heartbeat; one without a heartbeat for SILENT_S does not.
STACKS_TIMEOUT_S = 10.0
SILENT_S = 5.0
# Ranks whose stacks are taken at once.
STACKS_AT_ONCE = 8
# The detail of a server's rank whose time to arm passed without a request.
IDLE = "idle"
# A process chooses a part of its files' names, so that no other user can foretell them.
_TOKEN = re.compile("[0-9a-f]{16}")


@dataclass(frozen=True, slots=True)
class AskedRank:
    """A rank, the ring of the process that was asked, and the folder that contains it."""

    rank: Rank
    ring_name: str
    owner_uid: int
    folder: RingFolder

    def send(self, command: dict[str, Any]) -> None:
        """Write the rank's command file."""
        try:
            self.folder.commands.send(self.ring_name, command)
        except OSError as error:
            # The rank then does not answer and is reported missing.
            logger.warning("cannot send to %s: %s", self.ring_name, error)


class LocalParticipants:
    """The ranks of this node that have a ring."""

    is_local = True

    def __init__(
        self, policy: Policy, ranks: RanksSource, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._policy = policy
        self._ranks = ranks
        self._monotonic = monotonic

    def jobs(self) -> Iterable[LiveJob]:
        return [self._job(job) for job in {rank.job for rank in self._ranks.live()}]

    def _job(self, job: JobId) -> LiveJob:
        live = self._ranks.targets(job)
        claims = [rank.claims for rank in live.values()]
        world_size = max((one.world_size for one in claims), default=0)
        events = max((one.events_per_step for one in claims), default=0)
        return LiveJob(job, live.keys(), world_size, events or None)

    def choose(self, job: LiveJob, request: CaptureRequest) -> Collection[int]:
        """Return all ranks; of a server only those that compute, unless only stacks are taken."""
        if request.kind not in STEP_KINDS:
            return job.ranks
        live = self._ranks.targets(job.id)
        return [number for number in job.ranks if number in live and live[number].computes]

    def of(
        self, job: LiveJob, numbers: Collection[int], request: CaptureRequest
    ) -> Sequence[Participant]:
        live = self._ranks.targets(job.id)
        targets: dict[int, AskedRank] = {}
        for number in sorted(live.keys() & set(numbers)):
            if request.kind in STEP_KINDS and not live[number].computes:
                role = live[number].claims.role
                raise Refused("refused_no_rank", f"rank {number}, the {role}, has only stacks")
            calls = live[number].calls_without_step
            if calls and request.kind in STEP_KINDS:
                raise Refused("refused_no_step", f"rank {number}: {no_step(calls)}")
            found = self._ranks.open_ring(live[number])
            if found is not None:
                ring, folder = found
                self._policy.check_owners([ring.payer])
                targets[number] = AskedRank(live[number], ring.name, ring.owner_uid, folder)
        if not targets:
            raise Refused("refused_no_rank", f"every rank of {request.job} has just ended")
        arm_timeout_s, begun = self._policy.config.arm_timeout_s, self._ranks.step_begun
        return [LocalRanks(numbers, targets, request, arm_timeout_s, begun, self._monotonic)]


class LocalRanks(Participant):
    """Ranks of this node, each of which has a command file.

    ``targets``: the ranks among ``numbers`` that have not ended. ``begun`` reads the step that
    a rank has begun.
    """

    reach = Reach(MARGIN_S, MARGIN_STEPS)

    def __init__(
        self,
        numbers: Iterable[int],
        targets: dict[int, AskedRank],
        request: CaptureRequest,
        arm_timeout_s: float,
        begun: Callable[[Rank], int | None],
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(numbers)
        self.targets = targets
        for number in self.ranks.keys() - targets.keys():
            self.ranks[number] = RankCapture(number, "missing", "the process ended")
        self._job, self._kind = request.job_id, request.kind
        self._steps, self._start = request.steps, 0
        # Stacks wait for processes, traces for the disk.
        self.fetches = STACKS_AT_ONCE if request.kind == "stacks" else 1
        self._begun = begun
        self._monotonic = monotonic
        self._least_arm_timeout_s = self._arm_timeout_s = arm_timeout_s
        self._deadline = monotonic() + MAX_CAPTURE_S
        # Answers to an earlier attempt have another id.
        self._command_id = ""
        self._asked_at = monotonic()
        self._recording_at: float | None = None
        self._silent: set[int] = set()
        # By rank, the answer's fields on the names of its files.
        self._answers: dict[int, Mapping[str, Any]] = {}
        self._outside_deadline: float | None = None

    # --- commands ---

    def prepare(self, request: CaptureRequest, at: float) -> None:
        """Read how far the ranks are from their rings."""
        begun = fastest([self._begun(target.rank) or 0 for target in self.targets.values()])
        numbers = tuple(sorted(self.ranks))
        self.answer = Prepared(numbers, request.steps, begun, self._step_s(min))

    def arm(self, capture: Capture, attempt: int, at: float) -> None:
        self._command_id = f"{capture.id}-{attempt}"
        self._asked_at = at
        self._arm_timeout_s = min(
            max(self._least_arm_timeout_s, ARM_STEPS * self._step_s(max)), MAX_ARM_TIMEOUT_S
        )
        self._steps = capture.steps or capture.request.steps
        self._start = capture.start_step or 0
        self._recording_at = self.recording_time = None
        command = {
            "op": "capture",
            "id": self._command_id,
            "kind": self._kind,
            "start_step": self._start,
            "steps": self._steps,
            "options": list(capture.request.options),
            "arm_timeout_s": self._arm_timeout_s,
        }
        for number, rank in self.ranks.items():
            if rank.state not in RANK_ENDS or rank.state == "late":
                self.ranks[number] = RankCapture(number)
                self.targets[number].send(command)

    def withdraw(self) -> None:
        """Do nothing: the next command replaces this one."""

    def cancel(self, detail: str = "") -> None:
        for number, rank in self.ranks.items():
            if detail and not is_over(rank):
                self.ranks[number] = rank = replace(rank, state="missing", detail=detail)
            if rank.state in ("missing", "late") and number in self.targets:
                self.targets[number].send({"op": "cancel", "id": self._command_id})

    def _step_s(self, choose: Callable[[list[float]], float]) -> float:
        """Return the median step seconds of the fastest (min) or slowest (max) rank, or 0."""
        ranks: Iterable[RunningRank] = (target.rank for target in self.targets.values())
        recent = [list(rank.recent) for rank in ranks]
        return choose([statistics.median(steps_s) for steps_s in recent if steps_s] or [0.0])

    # --- answers ---

    def observe(self, event: RankEvent | End, at: float) -> None:
        number = event.rank
        rank = None if number is None else self.ranks.get(number)
        if rank is None or event.job_id != self._job or rank.state in RANK_ENDS:
            return
        if isinstance(event, End) or event.event == "died":
            if rank.state != "exported":
                how = "ended" if isinstance(event, End) else "died"
                detail = f"the process {how} {_WHEN[rank.state]}"
                self.ranks[rank.rank] = replace(rank, state="missing", detail=detail)
        elif event.detail.get("id") == self._command_id:
            self.ranks[event.rank] = _answered(rank, event)
            self._answers[event.rank] = event.detail
            if event.event == "capture_started" and self._recording_at is None:
                self._recording_at, self.recording_time = at, event.time

    def has_passed(self, number: int, start_step: int, at: float) -> bool:
        # Until then, even a rank that is behind may arm.
        return (self._begun(self.targets[number].rank) or 0) >= start_step

    # --- time-outs ---

    def advance(self, at: float) -> None:
        for number, rank in self.ranks.items():
            overdue = "" if is_over(rank) else self._overdue(rank, at)
            if overdue:
                self.ranks[number] = replace(rank, state="missing", detail=overdue)
        if self.ranks and all(rank.detail == IDLE for rank in self.ranks.values()):
            self.cancel()
            waited_s = at - self._asked_at
            raise Refused("refused_idle", f"no request came within {waited_s:.0f} s")

    @property
    def is_over(self) -> bool:
        return all(map(is_over, self.ranks.values()))

    def _overdue(self, rank: RankCapture, at: float) -> str:
        waited_s, target = at - self._asked_at, self.targets[rank.rank].rank
        if self._kind == "stacks":
            silence_s = target.process.silence.duration_s(at)
            silent = target.status == "stopped" or silence_s >= SILENT_S
            if silent:
                self._silent.add(rank.rank)
            limit_s = stacks.ANSWER_S if silent else STACKS_TIMEOUT_S
            return f"no answer within {waited_s:.0f} s" if waited_s >= limit_s else ""
        if at >= self._deadline:
            return f"not done within {MAX_CAPTURE_S:.0f} s"
        if rank.state in ("asked", "armed"):
            over = waited_s >= self._arm_timeout_s
            if over and target.is_idle:
                return IDLE
            stopped = ": the process is stopped" if target.status == "stopped" else ""
            detail = f"step {self._start} not begun within {waited_s:.0f} s{stopped}"
            return detail if over else ""
        since = self._asked_at if self._recording_at is None else self._recording_at
        # The recorded steps take their time, and twice that under the profiler.
        steps_s = min(2 * (self._steps + 1) * self._step_s(max), MAX_RECORDING_S)
        over = at - since >= max(CAPTURE_TIMEOUT_S, steps_s)
        return f"no file within {at - since:.0f} s of recording" if over else ""

    # --- files ---

    def _fetched(self, rank: RankCapture, folder: Path) -> Collected:
        number = rank.rank
        if rank.detail == "no_inbox":
            remedy = self.targets[number].folder.inbox_remedy
            return Collected(replace(rank, detail=f"no_inbox: {remedy}"))
        if rank.state == "missing" and number in self._silent:
            return self._take_from_outside(number, folder)
        if rank.state != "exported":
            return Collected(rank)
        if self._kind not in inbox.SUFFIX:
            # Nsight Systems writes the file itself, to where its command line says.
            return Collected(replace(rank, state="written"))
        # The allocator's snapshot is written first; the answer calls the rest ``more``.
        field = "more" if self._kind == "memory" else "token"
        name = self._take(number, field, inbox.SUFFIX[self._kind], folder)
        files = [name]
        if self._kind == "memory":
            with contextlib.suppress(FetchError, OSError):
                files.append(self._take(number, "token", inbox.SNAPSHOT_SUFFIX, folder))
        return Collected(replace(rank, state="written", file=name), tuple(files), name)

    def _take_from_outside(self, number: int, folder: Path) -> Collected:
        """Take the stacks of a rank that cannot answer; all ranks together have WAIT_S."""
        if self._outside_deadline is None:
            self._outside_deadline = self._monotonic() + stacks.WAIT_S
        rank, target = self.ranks[number], self.targets[number]
        name = f"rank{number}{inbox.SUFFIX['stacks']}"
        try:
            silent = stacks.inspect(target.rank, target.ring_name)
            via = stacks.write_stacks(
                silent,
                target.folder.inbox,
                folder / name,
                self._outside_deadline,
                monotonic=self._monotonic,
            )
        except stacks.NoStacks as error:
            return Collected(replace(rank, detail=str(error)))
        rank = replace(rank, state="written", file=name, detail=f"taken by {via}")
        return Collected(rank, (name,), name)

    def _take(self, number: int, field: str, suffix: str, folder: Path) -> str:
        target, name = self.targets[number], f"rank{number}{suffix}"
        token = self._answers.get(number, {}).get(field)
        if not isinstance(token, str) or not _TOKEN.fullmatch(token):
            raise FetchError(f"the answer has no {field} of a file")
        source = f"{self._command_id}.{target.ring_name.removesuffix('.ring')}.{token}{suffix}"
        inbox.copy_out(target.folder.inbox, source, target.owner_uid, folder / name)
        return name

    def expectation(self, number: int) -> Expectation | None:
        if self._kind != "torch" or number not in self.targets:
            return None
        on_gpu = self.targets[number].rank.claims.device is not None
        last = self._start + self._steps - 1
        return Expectation(number, self._start, last, on_gpu=on_gpu)


_STATE = {
    "capture_armed": "armed",
    "capture_late": "late",
    "capture_started": "recording",
    "capture_finished": "exported",
    "capture_failed": "failed",
    "capture_disarmed": "failed",
}
_STEPS = ("first_step", "last_step")
_WHEN = {"asked": "before it answered", "armed": "while armed", "recording": "while recording"}


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
