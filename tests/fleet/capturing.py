"""Agents with real coordinators and HTTP servers, whose ranks the test plays, and a fleet's side.

The stream is read by hand, so that a test can leave an agent out.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.daemon.captures.capture_node import TRAIN, CaptureNode
from tests.daemon.http.conftest import MemoryAgent, servers
from warpwatch_daemon.captures.capture_register import CaptureRegister
from warpwatch_daemon.captures.store import Store
from warpwatch_daemon.config.sections import StoreConfig
from warpwatch_daemon.config.triggers import RecipeConfig, TriggersConfig
from warpwatch_daemon.state.hub import Hub
from warpwatch_detection.config import AnomaliesConfig, DetectionConfig
from warpwatch_fleet.captures.requests import Captures
from warpwatch_fleet.cluster import Cluster
from warpwatch_fleet.config import AgentsConfig, ShardConfig
from warpwatch_fleet.following import Agents
from warpwatch_fleet.targets import Target
from warpwatch_telemetry.captures import Capture, CaptureRequest, Prepared
from warpwatch_telemetry.jobs import JobId
from warpwatch_telemetry.log import encode_line
from warpwatch_telemetry.records import Clock, RankSeen
from warpwatch_telemetry.stream import CursorLine, encode_stream_line

TICK_S = 0.05
TICKS_ARMED = 3
WORLD = 4
# What a rank answers to the command of this id; None: nothing.
Answers = Callable[[int, str], str | None]
Records = Callable[[str], bool | str]


class PlayedAgent(MemoryAgent):
    """A node with some ranks of the job TRAIN."""

    def __init__(self, folder: Path, stack: ExitStack, name: str, ranks: range) -> None:
        own = folder / name
        own.mkdir()
        super().__init__(own)
        self.name = name
        self.numbers = ranks
        self.node = CaptureNode(own, stack, ranks=ranks, world_size=WORLD)
        self.address = ""
        self.is_heard = True
        self.obeyed: dict[int, str] = {}
        self.ticks = 0
        self.armed_at: dict[int, int] = {}

    def request_capture(
        self, request: CaptureRequest, name: str = "", start_step: int | None = None
    ) -> Capture:
        return self.node.coordinator.request(self._own(request), name, start_step)

    def prepare_capture(self, request: CaptureRequest) -> Prepared:
        return self.node.coordinator.prepare(self._own(request))

    def _own(self, request: CaptureRequest) -> CaptureRequest:
        """For the fleet its ranks may be another owner's than that of the test's files."""
        return replace(request, owner=TRAIN.owner)

    def cancel_capture(self, name: str) -> Capture | None:
        return self.node.coordinator.cancel(name, "cancelled by the fleet")

    def capture_file(self, capture_id: str, name: str, owner: str | None) -> Path | None:
        return self.node.coordinator.register.file(capture_id, name, owner)

    def captures(self) -> list[Capture]:
        return list(self.node.hub.state().captures)

    def play(self, answers: Answers, records: Records) -> None:
        """Ranks do as ``answers`` says with a command; who armed delivers some ticks later, for
        finishing takes time, in which other agents cannot answer.
        """
        self.ticks += 1
        self.node.poll()
        for index, rank in enumerate(self.numbers):
            with contextlib.suppress(ValueError, KeyError, IndexError):
                command = self.node.command(index)
                if command["op"] != "capture" or command["kind"] != "torch":
                    continue
                before = self.obeyed.get(rank)
                if before == f"armed {command['id']}":
                    late = self.ticks >= self.armed_at[rank] + TICKS_ARMED
                    came = late and records(command["id"])
                    if came is True:
                        self.node.deliver(index)
                    elif came:
                        self.node.answer(index, "capture_failed", detail=came)
                    if came:
                        self.obeyed[rank] = command["id"]
                elif before != command["id"]:
                    said = answers(rank, command["id"])
                    if said is not None:
                        self.node.answer(index, f"capture_{said}")
                        self.armed_at[rank] = self.ticks
                        mark = "armed " if said == "armed" else ""
                        self.obeyed[rank] = mark + command["id"]
        self.node.poll()
        self.node.coordinator.finish()

    def lines(self, after: str | None) -> list[bytes]:
        self.stream.put_captures(self.node.hub.state().captures)
        batch = self.stream.read(after)
        clock = encode_line(Clock(time.time())) or b""
        end = encode_stream_line(CursorLine(batch.cursor, self.name, "0.1.0"))
        return (batch.lines + clock + end).splitlines()


class PlayedFleet:
    """A fleet's side of captures, over these agents."""

    def __init__(
        self,
        folder: Path,
        stack: ExitStack,
        *agents: PlayedAgent,
        recipes: Mapping[str, RecipeConfig | None] | None = None,
        job: JobId = TRAIN,
    ) -> None:
        self.agents = agents
        self._token = folder / "token"
        self._token.write_text("secret")
        self.cluster = Cluster(DetectionConfig(), AnomaliesConfig())
        self.store = Store(StoreConfig(url=(folder / "fleet").as_uri()))
        self.register = CaptureRegister(self.store, Hub(1.0))
        self._recipes = TriggersConfig().recipes if recipes is None else recipes
        for agent in agents:
            if not agent.address:
                server = stack.enter_context(servers(agent))(token_file=self._token)
                agent.address = "{}:{}".format(*server.address)
        self.cluster.set_targets({one.address: Target(one.address) for one in agents})
        for agent in agents:
            agent.stream.read(None)
            agent.stream.put(
                RankSeen(time=time.time(), rank=rank, world_size=WORLD, **job.fields())
                for rank in agent.numbers
            )
        self.hear()

    def hear(self) -> None:
        for agent in self.agents:
            node = self.cluster.nodes[agent.address]
            node.up = agent.is_heard
            node.reason = "" if agent.is_heard else "ConnectError"
            if agent.is_heard:
                self.cluster.take(agent.address, agent.lines(node.cursor), time.time())

    def run(
        self,
        ask: Callable[[Captures], Any],
        answers: Answers = lambda rank, name: "armed",
        meanwhile: Callable[[], None] = lambda: None,
        records: Records = lambda name: True,
    ) -> Captures:
        """``ask``, and play until all captures have ended.

        ``records``: whether the start step of the command of this id comes, or why it fails.
        """

        async def play() -> Captures:
            agents = Agents(
                AgentsConfig(token_file=self._token, allow_plain=True), ShardConfig(), "fleet-0"
            )
            captures = Captures(
                self.cluster, agents, self._recipes, self.store,
                self.register,
            )  # fmt: skip
            try:
                asked = ask(captures)
                if asked is not None:
                    await asked
                while captures.is_busy:
                    await asyncio.to_thread(self._tick, answers, records)
                    meanwhile()
                    self.hear()
                    await asyncio.sleep(TICK_S)
            finally:
                await agents.close()
            return captures

        return asyncio.run(play())

    async def play_once(self) -> None:
        """Within ``ask``."""
        await asyncio.to_thread(self._tick, lambda rank, name: "armed", lambda name: True)
        self.hear()
        await asyncio.sleep(TICK_S)

    def _tick(self, answers: Answers, records: Records) -> None:
        for agent in self.agents:
            agent.play(answers, records)
