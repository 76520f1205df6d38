"""Captures by stock PyTorch's own Kineto: a window of time in a process that needs no shim."""

from __future__ import annotations

import secrets
import shutil
import statistics
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from warpwatch_daemon.captures.kineto.processes import LEAD_S, Order, Process, Processes
from warpwatch_daemon.captures.kineto.protocol import TraceConfig
from warpwatch_daemon.captures.kineto.trace_file import TraceFile
from warpwatch_daemon.captures.policy import EXPECTED_BYTES, Policy
from warpwatch_daemon.captures.verification import Expectation
from warpwatch_daemon.config.triggers import TriggersConfig
from warpwatch_daemon.ranks import inbox
from warpwatch_daemon.ranks.rank import Rank
from warpwatch_telemetry.captures import (
    CAPTURE_TIMEOUT_S,
    RANK_ENDS,
    Capture,
    CaptureKind,
    RankCapture,
)
from warpwatch_telemetry.errors import Refused
from warpwatch_telemetry.records import End, RankEvent
from warpwatch_telemetry.state import JobState

# Without step times a number of steps means nothing.
DEFAULT_WINDOW_S = 1.0
MIN_WINDOW_S = 0.1
# libkineto keeps 128 MB of GPU records and stops early beyond them.
MAX_WINDOW_S = 10.0
# CUPTI takes its time to attach, and nothing of it belongs into the window.
GPU_WARMUP_S = 1
# A poll may come so much later than it is due.
POLL_SLACK_S = 0.2
# For a process that was too late with its first request.
AGAIN_LEAD_S = 3 * LEAD_S
# What is still running when the window ends belongs to it.
WINDOW_SLACK_S = 2.0
# A process that is ready may have refused, or be done since its last poll: the file may still come.
REFUSED_GRACE_S = 3.0
# The process is gone; so long a file that it left is looked at.
GONE_GRACE_S = 1.0
# Another profiler that is still running after so long is not waited for.
BUSY_TIMEOUT_S = 5.0
MIN_FREE_SHARE = 0.2
REFUSED = (
    "PyTorch took the request and wrote nothing: another profiler was running, or it may not write "
    "to the inbox (torch 2.14 and newer: KINETO_ONDEMAND_TRACE_DIR); KINETO_LOG_LEVEL=1 says more"
)


class _Target:
    """A process, what is ordered of it now, and the file that shall come of that."""

    def __init__(self, process: Process, order: Order, asked_at: float) -> None:
        self.process = process
        self.gone_at: float | None = None
        self.again = False
        self.ask(order, asked_at)

    def ask(self, order: Order, asked_at: float) -> None:
        path = Path(order.config.log_file)
        name = f"{path.stem}_{self.process.pid}{path.suffix}"
        self.order = order
        self.asked_at = asked_at
        self.file = TraceFile(path.parent, name, self.process.sender.uid)


class KinetoSession:
    """A ``captures.session.Session``. ``at`` is monotonic."""

    def __init__(
        self,
        capture: Capture,
        targets: Mapping[int, _Target],
        inbox_path: Path,
        processes: Processes,
        triggers: TriggersConfig,
    ) -> None:
        # It is a window of time.
        self.capture = replace(capture, steps=None)
        self.ranks = {number: RankCapture(number) for number in targets}
        self._targets = targets
        self._inbox = inbox_path
        self._processes = processes
        self._triggers = triggers

    def observe(self, event: RankEvent | End, at: float) -> None:
        """Nothing: what becomes of a process its socket tells."""

    def advance(self, at: float) -> bool:
        """Whether every rank has ended or left its file."""
        for number, rank in self.ranks.items():
            if rank.state not in RANK_ENDS and rank.state != "exported":
                self.ranks[number] = self._moved(rank, at)
        if self.capture.recording_time is None:
            begun = [t.order.config.start_time for t in self._targets.values() if t.order.sent_at]
            if begun and min(begun) <= time.time():
                self.capture = replace(self.capture, recording_time=min(begun))
        return all(r.state in RANK_ENDS or r.state == "exported" for r in self.ranks.values())

    def _moved(self, rank: RankCapture, at: float) -> RankCapture:
        target = self._targets[rank.rank]
        if target.file.is_complete(at):
            return replace(rank, state="exported")
        problem = self._problem(target, at)
        if problem == REFUSED and not target.again:
            self._ask_again(target, at)
            return RankCapture(rank.rank)
        if problem:
            state = "missing" if problem.startswith("the process") else "failed"
            return replace(rank, state=state, detail=problem)
        order = target.order
        if order.sent_at is None:
            return rank
        recording = order.config.start_time <= time.time()
        return replace(rank, state="recording" if recording else "armed")

    def _ask_again(self, target: _Target, at: float) -> None:
        """Once, with more time: on a busy machine it looked too late, and the start was over."""
        target.again = True
        config = replace(
            target.order.config, log_file=_log_file(self._inbox, self.capture), start_time=0.0
        )
        name = target.process.sender.name
        target.ask(self._processes.give({name: config}, AGAIN_LEAD_S)[name], at)

    def _problem(self, target: _Target, at: float) -> str:
        """Why nothing is expected of the process any more; empty while it is."""
        order, triggers = target.order, self._triggers
        if order.sent_at is None:
            waited_s = at - target.asked_at
            if not target.process.ready and waited_s >= BUSY_TIMEOUT_S:
                return f"another profiler has been running for {waited_s:.0f} s"
            if waited_s >= triggers.arm_timeout_s:
                return f"the process did not ask for anything within {waited_s:.0f} s"
        elif at - order.sent_at >= CAPTURE_TIMEOUT_S + order.config.window_s:
            return f"no trace within {at - order.sent_at:.0f} s of the request"
        elif order.refused_at is not None and at - order.refused_at >= REFUSED_GRACE_S:
            return REFUSED
        if self._processes.is_live(target.process):
            return ""
        # Its file may still need its last look.
        target.gone_at = at if target.gone_at is None else target.gone_at
        return "the process ended" if at - target.gone_at >= GONE_GRACE_S else ""

    def cancel(self, detail: str = "") -> None:
        """Withdraw what was not sent; what was cannot be stopped from outside."""
        for number, rank in self.ranks.items():
            target = self._targets[number]
            self._processes.withdraw(target.process, target.order)
            if detail and rank.state not in RANK_ENDS and rank.state != "exported":
                self.ranks[number] = replace(rank, state="missing", detail=detail)

    def collect(self, number: int, folder: Path) -> tuple[RankCapture, tuple[str, ...]]:
        """Put the rank's trace into ``folder``: the rank as it is now, and the file's name."""
        rank = self.ranks[number]
        if rank.state != "exported":
            return rank, ()
        name = f"rank{number}{inbox.SUFFIX['torch']}"
        try:
            self._targets[number].file.take(folder / name)
        except inbox.InboxError as error:
            return replace(rank, state="failed", detail=str(error)), ()
        except OSError as error:
            return replace(rank, state="failed", detail=f"the store: {error.strerror}"), ()
        return replace(rank, state="written", file=name), (name,)

    def expectation(self, number: int) -> Expectation | None:
        target = self._targets[number]
        return Expectation(
            # Else the number is that of its arrival, and the trace knows better.
            rank=target.process.origin.rank,
            window_s=target.order.config.window_s + WINDOW_SLACK_S,
            on_gpu=target.process.has_gpu,
        )


class KinetoBackend:
    """A ``captures.session.Backend``. ``rings``: the ranks of a job that the shim reports."""

    name = "kineto"
    kinds: frozenset[CaptureKind] = frozenset({"torch"})

    def __init__(
        self,
        policy: Policy,
        inbox_path: Path,
        processes: Processes,
        rings: Callable[[str], Mapping[int, Rank]],
    ) -> None:
        self._policy = policy
        self._inbox = inbox_path
        self._processes = processes
        self._rings = rings

    def jobs(self) -> Collection[str]:
        """The names of the jobs that can be captured."""
        return self._processes.jobs()

    def ranks(self, job: str) -> Mapping[int, int]:
        """The job's live ranks, each with its world size."""
        members = self._processes.jobs().get(job, {})
        return {
            number: process.origin.world_size or len(members) for number, process in members.items()
        }

    def states(self) -> tuple[JobState, ...]:
        found = sorted(self._processes.jobs().items())
        return tuple(
            JobState(
                name=job,
                world_size=max(p.origin.world_size or len(members) for p in members.values()),
                ranks=tuple(map(str, sorted(members))),
                backend=self.name,
            )
            for job, members in found
        )

    def events_per_step(self, job: str) -> int | None:
        return None

    def begin(self, capture: Capture, numbers: Sequence[int], at: float) -> KinetoSession:
        """Order one window of all these ranks. Raises Refused."""
        members = self._processes.jobs().get(capture.request.job, {})
        chosen = {number: members[number] for number in numbers if number in members}
        if len(chosen) != len(numbers):
            raise Refused("refused_no_rank", f"a rank of {capture.request.job} has just ended")
        self._check_space(len(chosen))
        window_s = self._window_s(capture, chosen.values())
        configs = self._configs(capture, chosen, window_s, at)
        orders = self._processes.give(configs)
        targets = {
            number: _Target(process, orders[process.sender.name], at)
            for number, process in chosen.items()
        }
        return KinetoSession(capture, targets, self._inbox, self._processes, self._policy.config)

    def _configs(
        self, capture: Capture, chosen: Mapping[int, Process], window_s: float, at: float
    ) -> dict[str, TraceConfig]:
        """By the sender's name; the start leaves each of them time to poll and to look."""
        warmup_s = GPU_WARMUP_S if any(p.has_gpu for p in chosen.values()) else 0
        wait_s = max(_next_poll_s(process, at) for process in chosen.values())
        start_time = time.time() + wait_s + LEAD_S + warmup_s
        return {
            process.sender.name: TraceConfig(
                log_file=_log_file(self._inbox, capture),
                start_time=start_time,
                window_s=window_s,
                warmup_s=warmup_s,
                options=capture.request.options,
            )
            for process in chosen.values()
        }

    def _window_s(self, capture: Capture, processes: Iterable[Process]) -> float:
        """As long as the steps last, where the same processes report steps as well."""
        rings = self._rings(capture.request.job).values()
        recent = {(ring.owner_uid, ring.pid): tuple(ring.recent) for ring in rings}
        said = [recent.get((process.sender.uid, process.pid)) for process in processes]
        steps_s = [capture.request.steps * statistics.median(times) for times in said if times]
        return min(max([*steps_s, MIN_WINDOW_S]), MAX_WINDOW_S) if steps_s else DEFAULT_WINDOW_S

    def _check_space(self, count: int) -> None:
        try:
            usage = shutil.disk_usage(self._inbox)
        except OSError as error:
            raise Refused("refused_disk", f"{self._inbox}: {error.strerror}") from error
        left = usage.free - count * EXPECTED_BYTES
        if left < max(EXPECTED_BYTES, MIN_FREE_SHARE * usage.total):
            raise Refused(
                "refused_disk",
                f"{usage.free >> 20} MiB free in {self._inbox}, where {count} traces would go; "
                "free some or set rendezvous.inbox",
            )


def _log_file(folder: Path, capture: Capture) -> str:
    """Named so that nobody can have put something in its place."""
    return str(folder / f"{capture.id}.{secrets.token_hex(8)}.json")


def _next_poll_s(process: Process, at: float) -> float:
    """How long until the process asks again, at the latest; an overdue one is not waited for."""
    due_s = process.polled_at + process.poll_interval_s + POLL_SLACK_S - at
    return max(0.0, due_s)
