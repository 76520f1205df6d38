"""Whom stock PyTorch can capture: the processes that poll."""

from __future__ import annotations

import statistics
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from warpwatch_daemon.captures.disk import Disk
from warpwatch_daemon.captures.kineto.pollers import LEAD_S, Poller, Pollers
from warpwatch_daemon.captures.kineto.protocol import TraceConfig
from warpwatch_daemon.captures.kineto.session import AskedProcess, KinetoSession, log_file
from warpwatch_daemon.captures.policy import EXPECTED_BYTES, Policy
from warpwatch_daemon.ranks.rank import Rank
from warpwatch_telemetry.captures import Capture, CaptureKind
from warpwatch_telemetry.errors import Refused
from warpwatch_telemetry.jobs import JobId
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
MIN_FREE_SHARE = 0.2
# How often the inbox is looked at for traces.
LOOK_INTERVAL_S = 0.1


class KinetoBackend:
    """A ``captures.session.CaptureBackend``.

    ``ranks``: those that the shim reports.
    """

    name = "kineto"
    kinds: frozenset[CaptureKind] = frozenset({"torch"})

    def __init__(
        self,
        policy: Policy,
        inbox_disk: Disk,
        pollers: Pollers,
        ranks: Callable[[], Iterable[Rank]],
    ) -> None:
        self._policy = policy
        self._disk = inbox_disk
        self._inbox = inbox_disk.path
        self._pollers = pollers
        self._shim_ranks = ranks
        self._lock = threading.Lock()
        self._sessions: weakref.WeakSet[KinetoSession] = weakref.WeakSet()

    def look(self) -> None:
        """Whether traces have come; in a loop of its own, for the inbox may lie on a disk."""
        with self._lock:
            sessions = list(self._sessions)
        for session in sessions:
            session.look(time.monotonic())

    def jobs(self) -> Collection[JobId]:
        """The jobs that can be captured."""
        return self._pollers.jobs()

    def ranks(self, job: JobId) -> Mapping[int, int]:
        """The job's live ranks, each with its world size."""
        members = self._pollers.jobs().get(job, {})
        return {
            number: process.facts.world_size or len(members) for number, process in members.items()
        }

    def states(self) -> tuple[JobState, ...]:
        found = sorted(self._pollers.jobs().items())
        return tuple(
            JobState(
                name=job.name,
                world_size=max(p.facts.world_size or len(members) for p in members.values()),
                ranks=tuple(map(str, sorted(members))),
                backend=self.name,
                owner=job.owner,
            )
            for job, members in found
        )

    def events_per_step(self, job: JobId) -> int | None:
        return None

    def pace(self, job: JobId, numbers: Collection[int]) -> None:
        """It records a window of time, whatever steps are in it."""
        return None

    def begin(self, capture: Capture, numbers: Sequence[int], at: float) -> KinetoSession:
        """Order one window of all these ranks. Raises Refused."""
        members = self._pollers.jobs().get(capture.request.job_id, {})
        chosen = {number: members[number] for number in numbers if number in members}
        if len(chosen) != len(numbers):
            raise Refused("refused_no_rank", f"a rank of {capture.request.job} has just ended")
        self._policy.check_owners(process.sender.uid for process in chosen.values())
        self._check_space(len(chosen))
        window_s = self._window_s(capture, chosen.values())
        configs = self._configs(capture, chosen, window_s, at)
        orders = self._pollers.give(configs)
        targets = {
            number: AskedProcess(process, orders[process.sender.name], at)
            for number, process in chosen.items()
        }
        config = self._policy.config
        session = KinetoSession(capture, targets, self._inbox, self._pollers, config)
        with self._lock:
            self._sessions.add(session)
        return session

    def _configs(
        self, capture: Capture, chosen: Mapping[int, Poller], window_s: float, at: float
    ) -> dict[str, TraceConfig]:
        """By the sender's name; the start leaves each of them time to poll and to look."""
        warmup_s = GPU_WARMUP_S if any(p.has_gpu for p in chosen.values()) else 0
        wait_s = max(_next_poll_s(process, at) for process in chosen.values())
        start_time = time.time() + wait_s + LEAD_S + warmup_s
        return {
            process.sender.name: TraceConfig(
                log_file=log_file(self._inbox, capture),
                start_time=start_time,
                window_s=window_s,
                warmup_s=warmup_s,
                options=capture.request.options,
            )
            for process in chosen.values()
        }

    def _window_s(self, capture: Capture, processes: Iterable[Poller]) -> float:
        """As long as the steps last, where the same processes report steps as well."""
        recent = {(rank.owner_uid, rank.pid): tuple(rank.recent) for rank in self._shim_ranks()}
        said = [recent.get((process.sender.uid, process.pid)) for process in processes]
        steps_s = [capture.request.steps * statistics.median(times) for times in said if times]
        return min(max([*steps_s, MIN_WINDOW_S]), MAX_WINDOW_S) if steps_s else DEFAULT_WINDOW_S

    def _check_space(self, count: int) -> None:
        room = self._disk.room()
        left = room.free - count * EXPECTED_BYTES
        if left < max(EXPECTED_BYTES, MIN_FREE_SHARE * room.total):
            raise Refused(
                "refused_disk",
                f"{room.free >> 20} MiB free in {self._inbox}, where {count} traces would go; "
                "free some or set rendezvous.inbox",
            )


def _next_poll_s(process: Poller, at: float) -> float:
    """How long until the process asks again, at the latest; an overdue one is not waited for."""
    due_s = process.polled_at + process.poll_interval_s + POLL_SLACK_S - at
    return max(0.0, due_s)
