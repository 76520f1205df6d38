"""The processes that poll: who they are, which job and rank, and what was ordered of them."""

from __future__ import annotations

import statistics
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from warpwatch_daemon.captures.kineto.process_facts import UNKNOWN, ProcessFacts
from warpwatch_daemon.captures.kineto.protocol import MessageError, Poll, TraceConfig
from warpwatch_telemetry.jobs import JobId

MAX_PROCESSES = 1024
MAX_PROCESSES_PER_OWNER = 64
# Without a poll for so long a process is gone, or stopped.
GONE_AFTER_S = 60.0
# libkineto looks at a new request once a second; a start before that is refused silently.
TICK_S = 1.0
LEAD_S = TICK_S + 0.3
# So long after the start a process that took the request no longer says that it is ready.
BUSY_AFTER_START_S = 0.2
# Until a second poll shows it: what `run` sets. Stock PyTorch polls every 5 s.
DEFAULT_POLL_INTERVAL_S = 1.0


class Sender(NamedTuple):
    """Who sent a message, as the kernel says; pid 0: not in this PID namespace.

    name: of its socket in the folder.
    """

    name: str
    pid: int
    uid: int


@dataclass(slots=True)
class Order:
    """One trace ordered of one process, and what its polls show of it. ``*_at`` is monotonic.

    lead_s: from the poll that it answers to the start, at least; the warm-up comes on top.
    taken: it was busy with it. refused_at: it was ready for another one when it had to be busy.
    """

    config: TraceConfig
    lead_s: float = LEAD_S
    sent_at: float | None = None
    taken: bool = False
    refused_at: float | None = None


@dataclass(slots=True)
class Poller:
    """A process that polls.

    ``pid`` is its own view; ``registered``: only those do that see a GPU, and only once.
    """

    sender: Sender
    pid: int
    ancestors: tuple[int, ...]
    facts: ProcessFacts
    job_id: int
    polled_at: float
    ready: bool = True
    registered: bool = False
    order: Order | None = None
    intervals_s: deque[float] = field(default_factory=lambda: deque(maxlen=5))

    @property
    def has_gpu(self) -> bool:
        # One that registered with a daemon before this one shows it by its open files.
        return self.registered or self.facts.has_gpu

    @property
    def poll_interval_s(self) -> float:
        return statistics.median(self.intervals_s or [DEFAULT_POLL_INTERVAL_S])


class Pollers:
    """Bounded. The server's side is one thread; the captures' methods any thread may call."""

    def __init__(self, facts_of: Callable[[Sender], ProcessFacts]) -> None:
        self._facts_of = facts_of
        self._lock = threading.Lock()
        self._pollers: dict[str, Poller] = {}
        self._registered: dict[str, int] = {}

    # --- the server's side ---

    def register(self, sender: Sender) -> int:
        """The process has a GPU; how many have registered so far. Raises MessageError."""
        with self._lock:
            if sender.name not in self._registered:
                self._check_room(sender, self._registered.values(), len(self._registered))
                self._registered[sender.name] = sender.uid
            return len(self._registered)

    def poll(self, poll: Poll, sender: Sender, now: float, at: float) -> str:
        """The configuration that answers the poll, mostly empty. Raises MessageError."""
        known = self._known(sender)
        # Its files say who it is: the lock is not held while they are read.
        process = known or self._described(poll, sender, at)
        with self._lock:
            if known:
                process.intervals_s.append(at - process.polled_at)
            self._pollers[sender.name] = process
            process.polled_at = at
            process.ready = poll.ready
            process.registered = sender.name in self._registered
            return _answer(process, now, at)

    def forget(self, name: str) -> None:
        with self._lock:
            self._pollers.pop(name, None)
            self._registered.pop(name, None)

    def names(self) -> set[str]:
        with self._lock:
            return {*self._pollers, *self._registered}

    def expire(self, at: float) -> None:
        with self._lock:
            for name, process in list(self._pollers.items()):
                if at - process.polled_at >= GONE_AFTER_S:
                    del self._pollers[name]
                    self._registered.pop(name, None)

    def _known(self, sender: Sender) -> Poller | None:
        """None for one that is new and may come in. Raises MessageError."""
        with self._lock:
            process = self._pollers.get(sender.name)
            if process is None:
                owners = [other.sender.uid for other in self._pollers.values()]
                self._check_room(sender, owners, len(owners))
            elif process.sender.uid != sender.uid:
                raise MessageError("not_the_owner")
            return process

    def _described(self, poll: Poll, sender: Sender, at: float) -> Poller:
        pid, *ancestors = poll.pids
        facts = self._facts_of(sender)
        if facts is UNKNOWN and poll.job_id:
            facts = replace(facts, job=f"{facts.job}-{poll.job_id}")
        return Poller(sender, pid, tuple(ancestors), facts, poll.job_id, at)

    @staticmethod
    def _check_room(sender: Sender, owners: Iterable[int], count: int) -> None:
        mine = sum(1 for uid in owners if uid == sender.uid)
        if count >= MAX_PROCESSES or mine >= MAX_PROCESSES_PER_OWNER:
            raise MessageError("too_many")

    # --- the captures' side ---

    def jobs(self) -> dict[JobId, dict[int, Poller]]:
        """The ranks of every job by number; a second job of an owner's name is ``name#2``."""
        with self._lock:
            return group(list(self._pollers.values()))

    def is_live(self, process: Poller) -> bool:
        with self._lock:
            return self._pollers.get(process.sender.name) is process

    def give(self, configs: Mapping[str, TraceConfig], lead_s: float = LEAD_S) -> dict[str, Order]:
        """Order traces, by the sender's name; each is the answer to its next poll, once."""
        with self._lock:
            made = {name: Order(config, lead_s) for name, config in configs.items()}
            for name, order in made.items():
                if name in self._pollers:
                    self._pollers[name].order = order
            return made

    def withdraw(self, process: Poller, order: Order) -> None:
        """It is no longer waited for; what was sent already goes on."""
        with self._lock:
            if process.order is order:
                process.order = None


def _answer(process: Poller, now: float, at: float) -> str:
    order = process.order
    if order is None:
        return ""
    if order.sent_at is None:
        if not process.ready:
            return ""
        # A process that polls late begins late: a start in its past would be refused.
        earliest = now + order.lead_s + order.config.warmup_s
        order.config = replace(order.config, start_time=max(order.config.start_time, earliest))
        order.sent_at = at
        return order.config.text()
    if not process.ready:
        order.taken = True
    elif now >= order.config.start_time + BUSY_AFTER_START_S and order.refused_at is None:
        order.refused_at = None if order.taken else at
    return ""


def group(processes: list[Poller]) -> dict[JobId, dict[int, Poller]]:
    """Ranks by job, in the order in which they came; launchers and helpers are none."""
    jobs: dict[JobId, dict[int, Poller]] = {}
    for process in _ranks(processes):
        number = 1
        while not _fits(process, jobs.setdefault(_job(process, number), {})):
            number += 1
        members = jobs[_job(process, number)]
        rank = process.facts.rank
        members[len(members) if rank is None else rank] = process
    return jobs


def _job(process: Poller, number: int) -> JobId:
    """Nothing that this protocol says tells one run from the next."""
    name = process.facts.job
    return JobId(f"uid/{process.sender.uid}", name if number == 1 else f"{name}#{number}", "")


def _fits(process: Poller, members: dict[int, Poller]) -> bool:
    facts = process.facts
    return facts.rank not in members and all(
        other.facts.world_size == facts.world_size for other in members.values()
    )


def _ranks(processes: list[Poller]) -> list[Poller]:
    """Without torchrun, which imports torch as well, and what a rank itself has started.

    Where RANK is known, a child that has its parent's is the parent's helper (a DataLoader worker
    that was spawned); one that has another was launched by it. Else the children are the ranks.
    """
    by_pid = {_key(p, p.pid): p for p in processes}
    none: set[str] = set()
    for process in processes:
        for pid in process.ancestors:
            parent = by_pid.get(_key(process, pid))
            if parent is None:
                continue
            known = process.facts.known and parent.facts.known
            helper = known and process.facts.rank_variable == parent.facts.rank_variable
            none.add(process.sender.name if helper else parent.sender.name)
    return [process for process in processes if process.sender.name not in none]


def _key(process: Poller, pid: int) -> tuple[int, str, int, int]:
    """PIDs mean something only among processes of one owner and PID namespace."""
    return process.sender.uid, process.facts.pid_namespace, process.job_id, pid
