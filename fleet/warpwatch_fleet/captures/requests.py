"""All captures that go through the fleet: asked for by people and by its own anomalies."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from dataclasses import replace
from operator import attrgetter
from typing import Any

import msgspec

from warpwatch_capturing.children.confinement import Run, run
from warpwatch_capturing.config import RecipeConfig
from warpwatch_capturing.finisher import DIAGNOSED_KINDS
from warpwatch_capturing.register import CaptureRegister
from warpwatch_capturing.store import Store
from warpwatch_capturing.triggers.decisions import MAX_TRIES, is_interrupted
from warpwatch_capturing.triggers.recipes import automatic
from warpwatch_fleet.captures.choosing import find_job, parts_of
from warpwatch_fleet.captures.merging import Merging, shown
from warpwatch_fleet.captures.over_nodes import OverNodes
from warpwatch_fleet.captures.part import Part, joined
from warpwatch_fleet.cluster import Cluster
from warpwatch_fleet.following import AgentError, Agents
from warpwatch_telemetry import capture_id as ids
from warpwatch_telemetry.anomalies import Anomaly
from warpwatch_telemetry.captures import (
    CAPTURED,
    NO_RECIPE,
    Capture,
    CaptureRequest,
    Decision,
)
from warpwatch_telemetry.errors import Refused
from warpwatch_telemetry.jobs import JobId
from warpwatch_telemetry.newest import put_newest

logger = logging.getLogger(__name__)

# Those that have ended are shown so long as there are not more.
MAX_KEPT = 200
MAX_DECISIONS = 1000
# How long the record of a capture waits for the nodes' uploads.
SETTLED_S = 600.0
# How long another thread waits for the agent of a job on one node.
ASK_TIMEOUT_S = 30.0


class Captures:
    """Coroutines are of the loop that follows the agents."""

    def __init__(
        self,
        cluster: Cluster,
        agents: Agents,
        recipes: Mapping[str, RecipeConfig | None],
        store: Store,
        register: CaptureRegister,
        monotonic: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        run: Run = run,
    ) -> None:
        self._cluster = cluster
        self._agents = agents
        self._recipes = recipes
        self._store = store
        self._register = register
        for capture in register.all():
            register.keep(replace(capture, diagnosis=shown(capture.diagnosis)))
        self._monotonic = monotonic
        self._wall = wall
        self._sleep = sleep
        self._merging = Merging(agents, monotonic, run)
        # Of captures that this fleet has taken.
        self._taken: dict[str, list[Part]] = {}
        self._decisions: dict[str, Decision] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def idle(self) -> None:
        """Return once no capture is being begun or followed."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    # --- asking ---

    def ask(self, request: CaptureRequest, loop: asyncio.AbstractEventLoop) -> Capture:
        """``request`` from another thread. It may wait for an agent. Raises Refused."""
        asked = asyncio.run_coroutine_threadsafe(self.request(request), loop)
        try:
            return asked.result(ASK_TIMEOUT_S)
        except TimeoutError as error:
            asked.cancel()
            raise Refused("failed", f"no answer within {ASK_TIMEOUT_S:g} s") from error

    async def request(self, request: CaptureRequest) -> Capture:
        """Begin a capture. Raises Refused."""
        with self._cluster.lock:
            job = find_job(self._cluster, request)
            parts = parts_of(self._cluster, job, request)
        if len(parts) == 1:
            return await self._pass_on(parts[0], request)
        now = self._wall()
        request = replace(request, **job.id.fields())
        ranks = tuple(
            sorted((one for part in parts for one in part.states()), key=attrgetter("rank"))
        )
        capture = Capture(ids.new(now), request, now, ranks, job.world_size)
        self._register.keep(capture)
        self._begin(self._take(capture, parts))
        return capture

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        """The loop alone would forget it."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _pass_on(self, part: Part, request: CaptureRequest) -> Capture:
        """Ranks of one node are its agent's to capture."""
        if part.lost:
            raise Refused("failed", part.shortcoming())
        body = part.body(request)
        body["ranks"] = None if request.ranks is None else body["ranks"]
        try:
            answer = await self._agents.ask(part.target, "captures", body)
            capture = msgspec.convert(answer, Capture)
        except Refused as error:
            raise Refused(error.reason, f"{part.node}: {error}") from error
        except (AgentError, msgspec.ValidationError) as error:
            raise Refused("failed", f"{part.node}: {error}") from error
        with self._cluster.lock:
            node = self._cluster.nodes.get(part.target.address)
            if node is not None:
                node.take_capture(capture)
        return capture

    async def _take(self, capture: Capture, parts: list[Part]) -> None:
        logger.info(
            "capture %s: %s of %s, %d ranks on %d nodes (%s)",
            capture.id,
            capture.request.kind,
            capture.request.job,
            len(capture.ranks),
            len(parts),
            capture.request.reason or capture.request.trigger,
        )
        try:
            over_nodes = OverNodes(
                capture, parts, self._agents, self._look, self._register.keep,
                self._monotonic, self._wall, self._sleep,
            )  # fmt: skip
            ended = await over_nodes.take()
            ended = await self._conclude(ended, parts)
        except Exception as error:
            logger.exception("capture %s is given up", capture.id)
            detail = f"{type(error).__name__}: {error}"
            ended = replace(capture, outcome="failed", detail=detail, end_time=self._wall())
        if str(ended.outcome).startswith("refused_"):
            self._register.refuse(ended)
        else:
            self._register.keep(ended)
        if ended.folder is not None:
            await asyncio.to_thread(self._register.update, ended.id)
        logger.info("capture %s: %s %s", ended.id, ended.outcome, ended.detail)
        if ended.request.anomaly_id and (ended.outcome or "").startswith("refused_"):
            self._decide(ended.request.anomaly_id, str(ended.outcome), ended.detail, ended.id)
        if self._is_worth_another(ended):
            await self._try(ended.request)

    async def _conclude(self, capture: Capture, parts: list[Part]) -> Capture:
        """With its folder, and what all that was brought says."""
        if str(capture.outcome).startswith("refused_"):
            return capture
        folder = self._store.folder(capture.id, capture.time)
        on_nodes = tuple(rank.file for rank in capture.ranks if rank.file)
        stored = replace(capture, folder=str(folder), files=on_nodes)
        try:
            await asyncio.to_thread(self._store.create, stored)
        except OSError as error:
            logger.error("capture %s is not diagnosed: %s", capture.id, error)
            why = f"not diagnosed: {error.strerror}"
            return replace(capture, detail="; ".join(filter(None, (capture.detail, why))))
        put_newest(self._taken, capture.id, parts, MAX_KEPT)
        if capture.request.kind not in DIAGNOSED_KINDS or capture.outcome == "failed":
            return stored
        return await self._merging.diagnose(stored, parts)

    def is_settled(self, capture_id: str) -> bool:
        """Whether all nodes have brought their parts into the remote store, or will not."""
        capture = self._register.get(capture_id)
        if capture is None or self._wall() - (capture.end_time or 0.0) > SETTLED_S:
            self._taken.pop(capture_id, None)
            return True
        parts = self._taken.get(capture_id)
        return parts is not None and all(part.lost or self._is_remote(part) for part in parts)

    def _is_remote(self, part: Part) -> bool:
        if part.said is not None:
            self._look(part, part.said.id)
        return part.said is not None and part.said.remote is not None

    def download(self, capture_id: str, name: str, owner: str | None) -> Iterator[bytes] | None:
        """A file from the agent that has it; None: nobody has. It blocks. Raises Refused."""
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
                if ids.base(one.id) == capture_id
                and name in one.files
                and owner in (None, one.request.owner)
                and (on_nodes is None or node.name in on_nodes)
            ]
        if not having:
            return None
        # An agent of a node is believed before a tenant's, which can claim any id for its owner.
        node, own_id = min(having, key=lambda one: one[0].target.owner is not None)
        chunks = self._agents.download(node.target, f"captures/{own_id}/{name}")
        try:
            return itertools.chain([next(chunks, b"")], chunks)
        except AgentError as error:
            raise Refused("failed", f"{node.name}: {error}") from error

    def _look(self, part: Part, name: str) -> str:
        with self._cluster.lock:
            node = self._cluster.nodes.get(part.target.address)
            if node is None:
                return "no longer a target of the fleet"
            part.said = node.captures.get(name, part.said)
            return "" if node.up else f"cannot be followed: {node.reason}"

    # --- anomalies ---

    def trigger(self, anomaly: Anomaly) -> None:
        """Ask for what the kind's recipe says; the agents' own policies have their say."""
        self._begin(self._triggered(anomaly))

    async def _triggered(self, anomaly: Anomaly) -> None:
        recipe = self._recipes.get(anomaly.kind)
        if recipe is None or anomaly.job_id is None:
            self._decide(anomaly.id, NO_RECIPE, f"triggers.recipes: none for {anomaly.kind}")
            return
        alone = recipe.ranks == "culprit" and anomaly.rank is not None
        ranks = (anomaly.rank,) if alone and anomaly.rank is not None else None
        await self._try(automatic(anomaly, recipe, ranks))

    async def _try(self, request: CaptureRequest) -> None:
        anomaly_id = str(request.anomaly_id)
        try:
            capture = await self.request(request)
        except Refused as error:
            logger.info("no %s capture for %s: %s", request.kind, request.anomaly_kind, error)
            self._decide(anomaly_id, error.reason, str(error))
        else:
            self._decide(anomaly_id, CAPTURED, "", capture.id)

    def _is_worth_another(self, capture: Capture) -> bool:
        """Whether an evaluation or the like came in between; of an anomaly one is repeated."""
        request = capture.request
        seen = request.anomaly_seen
        if request.anomaly_id is None or not is_interrupted(capture, seen.rank if seen else None):
            return False
        taken = [
            one for one in self._register.all() if one.request.anomaly_id == request.anomaly_id
        ]
        return len(taken) < MAX_TRIES

    def _decide(
        self, anomaly_id: str, outcome: str, detail: str, capture_id: str | None = None
    ) -> None:
        decision = Decision(self._wall(), anomaly_id, outcome, detail, capture_id)
        with self._cluster.lock:
            put_newest(self._decisions, anomaly_id, decision, MAX_DECISIONS)

    # --- what is shown, with the cluster's lock held ---

    def shown(self) -> tuple[Capture, ...]:
        """Those over nodes whole, and those that agents took alone."""
        return tuple(sorted(self._all(), key=lambda capture: capture.time))

    def _all(self) -> Iterator[Capture]:
        own = {capture.id: capture for capture in self._register.all()[-MAX_KEPT:]}
        yield from own.values()
        others: dict[tuple[JobId, str], list[Capture]] = {}
        for node in self._cluster.nodes.values():
            for capture in node.shown_captures():
                if ids.base(capture.id) not in own:
                    others.setdefault((capture.request.job_id, capture.id), []).append(capture)
        yield from map(joined, others.values())

    def decisions(self) -> tuple[Decision, ...]:
        return tuple(self._decisions.values())
