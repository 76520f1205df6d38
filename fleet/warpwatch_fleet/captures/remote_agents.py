"""The agents of other nodes as participants of captures."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import msgspec

from warpwatch_capturing import store
from warpwatch_capturing.participant import Collected, FetchError, LiveJob, Participant, Reach
from warpwatch_diagnosis.trace.files import reduction_name
from warpwatch_fleet.agent_link import AgentError, AgentLink
from warpwatch_fleet.cluster import Cluster
from warpwatch_fleet.node import FILE, Node
from warpwatch_fleet.targets import Target
from warpwatch_runtime import files
from warpwatch_telemetry.captures import (
    CAPTURE_ID,
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

# All nodes receive the start step, their ranks arm, and the fleet learns of it: within a second.
MARGIN_S = 2.0
MARGIN_STEPS = 4
# Between attempts, so that of two fleets that want the same ranks one comes first.
PAUSE_S = (0.1, 1.0)
# The profiler starts with the step before the first; until half a step before that ranks may arm.
LEAD_STEPS = 1.5
# How long ranks may take to arm if nobody knows how long a step takes.
UNKNOWN_S = 10.0
# If an agent is unreachable for this time, or lacks the capture, its part is given up.
LOST_S = 30.0
# More than an agent lets one of its own captures last.
MAX_S = 3 * 3600.0
MAX_DETAIL = 300
# Per rank: the most that a reduction has, and more than stacks have.
MAX_BYTES = 2 * 2**20
FETCH_TIMEOUT_S = 60.0
MAX_FETCHES = 8
# More traces than a person compares, and as many exports at a time as a shared disk stands.
MAX_RANKS = 16
# Healthy ranks in addition to those that an anomaly names: enough to show what is usual.
PEERS = 3

Start = Callable[[Coroutine[Any, Any, None]], None]


class RemoteAgents:
    """The agents that have ranks of a job. ``start`` runs a coroutine in the agents' loop."""

    is_local = False

    def __init__(
        self,
        cluster: Cluster,
        link: Callable[[Target], AgentLink],
        start: Start,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.cluster = cluster
        self.link = link
        self.start = start
        self.monotonic = monotonic

    def jobs(self) -> Iterable[LiveJob]:
        with self.cluster.lock:
            return [
                LiveJob(job.id, job.live_ranks().keys(), job.world_size)
                for job in self.cluster.jobs.values()
            ]

    def choose(self, job: LiveJob, request: CaptureRequest) -> Collection[int]:
        """Return all ranks for stacks, which cost almost nothing; else some."""
        if request.kind not in STEP_KINDS:
            return job.ranks
        with self.cluster.lock:
            found = self.cluster.jobs[job.id]
            active = [one for one in self.cluster.anomalies() if one.end_time is None]
            named = [one.rank for one in active if one.job_id in found.names()]
            return choose(found.computing_ranks(), [rank for rank in named if rank is not None])

    def of(
        self, job: LiveJob, numbers: Collection[int], request: CaptureRequest
    ) -> Sequence[RemoteAgent]:
        with self.cluster.lock:
            found = self.cluster.jobs[job.id]
            live = found.live_ranks()
            on_node: dict[str, list[int]] = {}
            for number in sorted(numbers):
                on_node.setdefault(live[number], []).append(number)
            return [
                self._agent(address, found.nodes[address], its)
                for address, its in sorted(on_node.items())
            ]

    def _agent(self, address: str, job: JobId, numbers: Sequence[int]) -> RemoteAgent:
        node = self.cluster.nodes.get(address)
        if node is None:
            raise Refused("refused_no_rank", f"{address} is no longer a target of the fleet")
        agent = RemoteAgent(self, node, job, numbers)
        if not node.up:
            agent.lose(f"cannot be followed: {node.reason}")
        return agent


class RemoteAgent(Participant):
    """Ranks of another node, which its agent captures as part of the fleet's capture.

    ``job``: its name on that node. reported: the agent's own capture, as it was last reported.
    """

    reach = Reach(MARGIN_S, MARGIN_STEPS, PAUSE_S)

    def __init__(
        self, agents: RemoteAgents, node: Node, job: JobId, numbers: Iterable[int]
    ) -> None:
        super().__init__(numbers)
        self.fetches = MAX_FETCHES
        self.node, self.target = node.name, node.target
        self.link = agents.link(node.target)
        self.reported: Capture | None = None
        self._agents = agents
        self._job = job
        self._kind = ""
        # The capture's name on the node: another attempt is another capture there.
        self._name = ""
        self._ready = Prepared(())
        self._asked_at = 0.0
        self._deadline = agents.monotonic() + MAX_S
        self._silent_since: float | None = None
        self._show()

    # --- requests ---

    def body(self, request: CaptureRequest, **more: Any) -> dict[str, Any]:
        """Return the request for this node."""
        return {
            **self._job.fields(),
            "kind": request.kind,
            "ranks": list(self.ranks),
            "steps": request.steps,
            "options": list(request.options),
            "reason": request.reason[:500],
            "anomaly_id": request.anomaly_id,
            "anomaly_kind": request.anomaly_kind,
            "anomaly_seen": request.anomaly_seen and asdict(request.anomaly_seen),
            "alerts": list(request.alerts),
            "scheduled": request.trigger == "schedule",
            **more,
        }

    def prepare(self, request: CaptureRequest, at: float) -> None:
        self._asked_at = at
        self._ask("captures/prepare", self.body(request))

    def arm(self, capture: Capture, attempt: int, at: float) -> None:
        if isinstance(self.answer, Prepared):
            self._ready = self.answer
        self._kind = capture.request.kind
        self._name = capture.id + (f"-{attempt}" if attempt > 1 else "")
        self.reported = self._silent_since = None
        more: dict[str, Any] = {"id": self._name}
        if capture.start_step is not None:
            more |= {"start_step": capture.start_step, "steps": capture.steps}
        self._ask("captures", self.body(capture.request, **more))

    def withdraw(self) -> None:
        """End the agent's capture of this attempt."""
        if self._name:
            self._ask(f"captures/{self._name}/cancel", {})
            self._name, self.reported = "", None
            self._show()

    def cancel(self, detail: str = "") -> None:
        if detail and not self.is_over:
            if self._name:
                self._ask(f"captures/{self._name}/cancel", {})
            self.lose(detail)

    def _ask(self, path: str, body: Mapping[str, Any]) -> None:
        self.is_awaited, self.answer = True, None
        self._agents.start(self._request(path, body))

    async def _request(self, path: str, body: Mapping[str, Any]) -> None:
        answer: Prepared | Exception | None = None
        try:
            reply = await self.link.request(path, body)
            if path == "captures/prepare":
                answer = msgspec.convert(reply, Prepared)
        except msgspec.ValidationError as error:
            answer = AgentError(f"prepare: {error}")
        except (AgentError, Refused) as error:
            answer = error
        except Exception as error:
            logger.exception("%s: %s", self.node, path)
            answer = AgentError(f"{type(error).__name__}: {error}")
        self.is_awaited, self.answer = False, answer

    # --- what the agent reports ---

    def observe(self, event: RankEvent | End, at: float) -> None:
        """Ignore events: the agent reports the state of its ranks."""

    def poll(self, name: str) -> str:
        """Read the newest state of the agent's capture. Return why there may be a newer one."""
        with self._agents.cluster.lock:
            node = self._agents.cluster.nodes.get(self.target.address)
            if node is None:
                return "no longer a target of the fleet"
            self.reported = node.captures.get(name, self.reported)
            return "" if node.up else f"cannot be followed: {node.reason}"

    def advance(self, at: float) -> None:
        """Update the ranks; an agent that is silent for too long is lost."""
        if not self._name or self.is_awaited or self.is_over:
            return
        away = self.poll(self._name)
        self._show()
        if not away and self.reported is not None:
            self._silent_since = None
        else:
            self._silent_since = at if self._silent_since is None else self._silent_since
            if at - self._silent_since >= LOST_S:
                self.lose(away or "it has no such capture")
        if at >= self._deadline and not self.is_over:
            self.lose("not done in time")

    def _show(self) -> None:
        by_rank = {rank.rank: rank for rank in self.reported.ranks} if self.reported else {}
        for number in self.ranks:
            rank = by_rank.get(number, RankCapture(number))
            self.ranks[number] = replace(rank, node=self.node, detail=rank.detail[:MAX_DETAIL])

    @property
    def is_over(self) -> bool:
        return bool(self.lost) or (self.reported is not None and self.reported.outcome is not None)

    def has_passed(self, number: int, start_step: int, at: float) -> bool:
        step_s, waited_s = self._ready.step_s or 0.0, at - self._asked_at
        ahead = start_step - (self._ready.begun or 0)
        return waited_s >= ((ahead - LEAD_STEPS) * step_s if step_s > 0 else UNKNOWN_S)

    def shortcomings(self, ranks: Iterable[RankCapture]) -> Iterator[str]:
        """Yield why the agent's part is not complete, with the node's name."""
        if self.lost:
            yield f"{self.node}: {self.lost}"
        elif self.reported is not None and self.reported.outcome not in (None, "complete"):
            yield f"{self.node}: {self.reported.detail[:MAX_DETAIL] or self.reported.outcome}"
        for rank in ranks:
            if store.is_usable(self.ranks[rank.rank]) and not store.is_usable(rank):
                yield f"{self.node}: rank {rank.rank}: {rank.detail}"

    # --- files ---

    def _fetched(self, rank: RankCapture, folder: Path) -> Collected:
        """Fetch a rank's reduction or stacks. Its trace stays on the node."""
        file = rank.file
        if not store.is_usable(rank) or file is None:
            return Collected(rank)
        name = reduction_name(file) if self._kind == "torch" else file
        reported = self.reported
        are_plain = FILE.fullmatch(file) and FILE.fullmatch(name)
        if reported is None or not are_plain or f"rank{rank.rank}." not in name:
            raise FetchError("its agent names no file of it")
        self._get(reported.id, name, folder / name)
        of_baseline = None
        if reported.baseline_id is not None and CAPTURE_ID.fullmatch(reported.baseline_id):
            of_baseline = store.BASELINE + name
            try:
                self._get(reported.baseline_id, name, folder / of_baseline)
            except (FetchError, OSError) as error:
                logger.info("no baseline of rank %d of %s: %s", rank.rank, reported.id, error)
                of_baseline = None
        brought = tuple(filter(None, dict.fromkeys((file, name, of_baseline))))
        return Collected(rank, brought, name, of_baseline)

    def _without_file(self, rank: RankCapture, why: str) -> RankCapture:
        return store.unread(rank, why)

    def _get(self, capture_id: str, name: str, path: Path) -> None:
        content, deadline = b"", self._agents.monotonic() + FETCH_TIMEOUT_S
        try:
            for chunk in self.link.download(f"captures/{capture_id}/{name}"):
                content += chunk
                if len(content) > MAX_BYTES or self._agents.monotonic() > deadline:
                    raise FetchError(f"more than {MAX_BYTES} bytes or {FETCH_TIMEOUT_S:g} s")
        except AgentError as error:
            raise FetchError(str(error)) from error
        files.write(path, content, durable=False)

    def expectation(self, number: int) -> None:
        """Return None: the agent has verified the trace."""
        return None


def spread(nodes: Mapping[int, str], count: int) -> tuple[int, ...]:
    """Return ``count`` of these ranks, over as many nodes as there are."""
    before: Counter[str] = Counter()
    turns = []
    for rank, node in sorted(nodes.items()):
        turns.append((before[node], rank))
        before[node] += 1
    return tuple(sorted(rank for _, rank in sorted(turns)[:count]))


def choose(nodes: Mapping[int, str], named: Collection[int]) -> tuple[int, ...]:
    """Return all ranks of a small job; else ``named`` and three peers, each of another node.

    ``nodes``: the node of each live rank. If no rank is named, one per node, at most MAX_RANKS.
    """
    if len(nodes) <= MAX_RANKS:
        return tuple(sorted(nodes))
    chosen = sorted(nodes.keys() & set(named))[: MAX_RANKS - PEERS]
    count = len(chosen) + PEERS if chosen else MAX_RANKS
    seen = {nodes[rank] for rank in chosen}
    for rank, node in sorted(nodes.items()):
        if node not in seen and len(chosen) < count:
            seen.add(node)
            chosen.append(rank)
    return tuple(sorted(chosen))
