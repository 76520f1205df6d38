"""Requests captures of a fleet: multi-node ones from the service, others from their agent."""

from __future__ import annotations

import asyncio
import atexit
import fnmatch
import itertools
import logging
import tempfile
import time
from collections.abc import (
    Awaitable,
    Callable,
    Coroutine,
    Iterable,
    Iterator,
    Sequence,
)
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import msgspec

from warpwatch_capturing.config import StoreConfig, TriggersConfig
from warpwatch_capturing.confinement import Run, run
from warpwatch_capturing.participant import Board, find_job
from warpwatch_capturing.policy import NoLimits
from warpwatch_capturing.register import CaptureRegister
from warpwatch_capturing.regular import RegularJob
from warpwatch_capturing.service import CaptureService
from warpwatch_capturing.store import Store
from warpwatch_fleet.agent_link import AgentError, Links
from warpwatch_fleet.captures.remote_agents import RemoteAgent, RemoteAgents, spread
from warpwatch_fleet.cluster import Cluster
from warpwatch_fleet.config import FleetFile, ScheduleConfig
from warpwatch_runtime.agent_metrics import AgentMetrics
from warpwatch_telemetry.captures import (
    Capture,
    CaptureRequest,
    Decision,
    base_id,
    capture_id_of_anomaly,
)
from warpwatch_telemetry.errors import Refused, UsageError
from warpwatch_telemetry.jobs import JobId
from warpwatch_telemetry.state import RankState

logger = logging.getLogger(__name__)

# Ended captures that are shown.
MAX_KEPT = 200
# How long the record of a capture waits for the nodes' uploads.
SETTLED_S = 600.0
# How long another thread waits for the agent of a job on one node.
ASK_TIMEOUT_S = 30.0
ADVANCE_S = 0.1


class FleetCaptures:
    """The captures that go through the fleet.

    Coroutines are for the loop that follows the agents; ``request``, ``captures``, ``capture`` and
    ``is_busy`` are for other threads.
    """

    def __init__(
        self,
        cluster: Cluster,
        agents: Links,
        config: TriggersConfig,
        register: CaptureRegister,
        board: Board,
        wake_finisher: Callable[[], None],
        monotonic: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        run: Run = run,
    ) -> None:
        self.config = config
        # Whether another process may go on with the same anomalies.
        self.are_shared = False
        self.is_mine: Callable[[JobId], bool] = lambda job: True
        self.loop: asyncio.AbstractEventLoop | None = None
        self._cluster = cluster
        self._agents = agents
        self._register = register
        self._monotonic = monotonic
        self._wall = wall
        self._sleep = sleep
        self._remote = RemoteAgents(cluster, agents.link, self._ask, monotonic)
        self.service = CaptureService(
            # Each agent applies its own limits to the capture's part on its node.
            NoLimits(config), register, self._remote, board, lambda busy: None, wake_finisher,
            monotonic, wall, run,
        )  # fmt: skip
        # Requests to agents that have not been answered, and the task while a capture runs.
        self._requests: set[asyncio.Task[None]] = set()
        self._advancing: asyncio.Task[None] | None = None

    def _ask(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a request to an agent."""
        task = asyncio.create_task(work)
        self._requests.add(task)
        task.add_done_callback(self._requests.discard)

    async def idle(self) -> None:
        """Return once no capture runs."""
        while tasks := [*self._requests, *((self._advancing,) if self._advancing else ())]:
            await asyncio.wait(tasks)

    async def _advance(self) -> None:
        try:
            while self.service.advance(self._monotonic()):
                if self._requests:
                    # The ranks go on while agents answer.
                    first = asyncio.FIRST_COMPLETED
                    await asyncio.wait(self._requests, timeout=ADVANCE_S, return_when=first)
                else:
                    await self._sleep(ADVANCE_S)
        finally:
            self._advancing = None

    # --- requests ---

    def request(self, request: CaptureRequest) -> Capture:
        """Start a capture, from another thread. It may wait for an agent. Raises Refused."""
        if self.loop is None:
            raise Refused("failed", "the fleet is starting")
        asked = asyncio.run_coroutine_threadsafe(self.start(request), self.loop)
        try:
            return asked.result(ASK_TIMEOUT_S)
        except TimeoutError as error:
            asked.cancel()
            raise Refused("failed", f"no answer within {ASK_TIMEOUT_S:g} s") from error

    async def start(self, request: CaptureRequest) -> Capture:
        """Start a capture. Raises Refused."""
        job = find_job(self._remote.jobs(), request)
        numbers = request.ranks or self._remote.choose(job, request)
        agents = self._remote.of(job, numbers, request)
        if len(agents) == 1:
            return await self._pass_on(agents[0], request)
        capture = self.service.request(request, self._name_of(request))
        if self._advancing is None:
            self._advancing = asyncio.create_task(self._advance())
        return capture

    def _name_of(self, request: CaptureRequest) -> str:
        """Return the capture's id if an anomaly wants it: agents refuse one that exists."""
        if not self.are_shared or request.anomaly_id is None:
            return ""
        before = [one for one in self.captures() if one.request.anomaly_id == request.anomaly_id]
        return capture_id_of_anomaly(request.anomaly_id, len(before), self._wall())

    async def _pass_on(self, agent: RemoteAgent, request: CaptureRequest) -> Capture:
        """Leave ranks of one node to its agent."""
        if agent.lost:
            raise Refused("failed", f"{agent.node}: {agent.lost}")
        body = agent.body(request)
        body["ranks"] = None if request.ranks is None else body["ranks"]
        try:
            capture = msgspec.convert(await agent.link.request("captures", body), Capture)
        except Refused as error:
            raise Refused(error.reason, f"{agent.node}: {error}") from error
        except (AgentError, msgspec.ValidationError) as error:
            raise Refused("failed", f"{agent.node}: {error}") from error
        with self._cluster.lock:
            node = self._cluster.nodes.get(agent.target.address)
            if node is not None:
                node.keep_capture(capture)
        return capture

    # --- files ---

    def is_settled(self, capture_id: str) -> bool:
        """Return whether all nodes have uploaded their parts, or will not."""
        capture = self._register.get(capture_id)
        if capture is None or self._wall() - (capture.end_time or 0.0) > SETTLED_S:
            return True
        nodes = {rank.node for rank in capture.ranks if rank.state == "written"}
        with self._cluster.lock:
            uploaded = {
                node.name
                for node in self._cluster.nodes.values()
                for one in node.captures.values()
                if base_id(one.id) == capture_id and one.remote is not None
            }
        return nodes <= uploaded

    def download(self, capture_id: str, name: str, owner: str | None) -> Iterator[bytes] | None:
        """Return a file from the agent that has it, or None. It blocks. Raises Refused."""
        own = self._register.get(capture_id)
        if name.endswith(".html") or (own and name not in [rank.file for rank in own.ranks]):
            return None
        on_nodes = {rank.node for rank in own.ranks if rank.file == name} if own else None
        owner = own.request.owner if own and owner is None else owner
        with self._cluster.lock:
            having = [
                (node, one.id)
                for node in self._cluster.nodes.values()
                for one in node.captures.values()
                if base_id(one.id) == capture_id
                and name in one.files
                and owner in (None, one.request.owner)
                and (on_nodes is None or node.name in on_nodes)
            ]
        if not having:
            return None
        # A node's agent is trusted before a tenant's, which can claim any id for its owner.
        node, own_id = min(having, key=lambda one: one[0].target.owner is not None)
        chunks = self._agents.link(node.target).download(f"captures/{own_id}/{name}")
        try:
            return itertools.chain([next(chunks, b"")], chunks)
        except AgentError as error:
            raise Refused("failed", f"{node.name}: {error}") from error

    # --- what is shown ---

    def captures(self) -> Sequence[Capture]:
        with self._cluster.lock:
            return self.shown()

    def capture(self, capture_id: str) -> Capture | None:
        own = self._register.get(capture_id)
        return own or next((one for one in self.captures() if one.id == capture_id), None)

    def is_busy(self, job: JobId) -> bool:
        shown = self.captures()
        return any(one.outcome is None and one.request.job_id == job for one in shown)

    def shown(self) -> tuple[Capture, ...]:
        """Return all captures, oldest first, for a caller that holds the cluster's lock."""
        return tuple(sorted(self._all(), key=lambda capture: capture.time))

    def _all(self) -> Iterator[Capture]:
        own = {capture.id: capture for capture in self._register.all()[-MAX_KEPT:]}
        yield from own.values()
        others: dict[tuple[JobId, str], list[Capture]] = {}
        for node in self._cluster.nodes.values():
            for capture in node.shown_captures():
                if base_id(capture.id) not in own:
                    others.setdefault((capture.request.job_id, capture.id), []).append(capture)
        yield from map(joined, others.values())


def joined(captures: Sequence[Capture]) -> Capture:
    """Return the parts of one capture as one, which an earlier fleet had started."""
    first, *others = captures
    if not others:
        return first
    outcomes = {one.outcome for one in captures}
    outcome = "partial" if outcomes & {"complete", "partial"} else "failed"
    ranks = sorted((rank for one in captures for rank in one.ranks), key=attrgetter("rank"))
    return replace(
        first,
        ranks=tuple(ranks),
        outcome=first.outcome if len(outcomes) == 1 else None if None in outcomes else outcome,
        detail="; ".join(filter(None, (one.detail for one in captures))),
        files=tuple(dict.fromkeys(name for one in captures for name in one.files)),
        diagnosis=None,
        cost_s=None,
        residual=None,
        step_s={},
    )


class Schedule:
    """A rule of ``triggers.regular``: every so often, some ranks of as many nodes as possible."""

    def __init__(self, schedules: Sequence[ScheduleConfig], cluster: Cluster) -> None:
        self._schedules = schedules
        self._cluster = cluster
        # When each job was captured last: its nodes forget that after MAX_CAPTURES of any job.
        self._captured_at: dict[JobId, float] = {}

    def jobs(self, now: float) -> Iterable[RegularJob]:
        with self._cluster.lock:
            known = self._cluster.jobs
            self._captured_at = {job: at for job, at in self._captured_at.items() if job in known}
            return [
                RegularJob(job.id, job.names())
                for job in self._cluster.jobs.values()
                if self._schedule(job.id) is not None and job.live_nodes()
            ]

    def _schedule(self, job: JobId) -> ScheduleConfig | None:
        """Return the first one that matches the job's name."""
        name = job.base_name
        return next((one for one in self._schedules if fnmatch.fnmatchcase(name, one.job)), None)

    def due(self, job: RegularJob, taken: Sequence[Capture], now: float) -> CaptureRequest | None:
        schedule = self._schedule(job.id)
        with self._cluster.lock:
            found = self._cluster.jobs.get(job.id)
            live, began = (found.computing_ranks(), found.begin_time) if found else ({}, now)
        own = [one for one in taken if one.request.trigger == "schedule"]
        times = [one.time for one in own if one.outcome in (None, "complete", "partial")]
        last = max([began, self._captured_at.get(job.id, began), *times])
        self._captured_at[job.id] = last
        if schedule is None or not live or now - last < schedule.every:
            return None
        return CaptureRequest(
            **job.id.fields(),
            kind=schedule.kind,
            trigger="schedule",
            ranks=spread(live, schedule.ranks),
            steps=schedule.steps,
            reason=f"fleet.schedules: {schedule.job}",
        )


# --- what the capture service needs of a fleet ---


def open_store(config: FleetFile) -> Store:
    """Open the store in ``fleet.state_dir``, or else one that lasts until the fleet ends."""
    try:
        return Store(_at(config, config.fleet.state_dir))
    except UsageError as error:
        reason = str(error).removesuffix("; set store.url")
        logger.warning("captures are not kept over a restart: %s; set fleet.state_dir", reason)
        folder = tempfile.TemporaryDirectory(prefix="warpwatch-fleet-")
        atexit.register(folder.cleanup)
        return Store(_at(config, Path(folder.name)))


def _at(config: FleetFile, folder: Path) -> StoreConfig:
    return config.store.model_copy(update={"url": (folder.absolute() / "captures").as_uri()})


class FleetMetrics(AgentMetrics):
    """The metrics of a fleet.

    Each agent counts its part of a capture; if the fleet counted it too, sums would be too high.
    Only captures that a restart interrupted are counted here: no agent sees that.
    """

    def count_capture(self, kind: str, trigger: str, outcome: str, owner: str) -> None:
        """Do nothing."""


class FleetBoard:
    """A ``participant.Board`` without ranks: none runs in the fleet's process."""

    def __init__(self, metrics: AgentMetrics) -> None:
        self.metrics = metrics
        self.decisions: tuple[Decision, ...] = ()

    def ranks(self) -> tuple[RankState, ...]:
        """Return no ranks."""
        return ()

    def publish(self, **parts: Any) -> None:
        """Keep the decisions; the rest of the state is composed when it is requested."""
        self.decisions = parts.get("decisions", self.decisions)
