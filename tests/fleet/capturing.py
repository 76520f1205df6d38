"""Agents with real capture services and HTTP servers, played ranks, and a fleet over them.

The stream is read by hand, so that a test can leave an agent out. Time passes only while the fleet
sleeps: then all ranks act once.
"""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.daemon.captures.capture_node import TRAIN, CaptureNode, read_here
from tests.daemon.http.conftest import MemoryAgent, servers
from tests.fleet.nodes import TestCluster, sent
from tests.manual_clock import ManualClock
from warpwatch_capturing.config import StoreConfig, TriggersConfig
from warpwatch_capturing.confinement import Run
from warpwatch_capturing.register import CaptureRegister
from warpwatch_capturing.store import Store
from warpwatch_capturing.triggers import Triggers
from warpwatch_detection.anomalies.register import Change
from warpwatch_fleet.agent_link import HttpLinks
from warpwatch_fleet.captures.requests import FleetBoard, FleetCaptures, FleetMetrics
from warpwatch_fleet.config import AgentsConfig
from warpwatch_fleet.targets import Target
from warpwatch_telemetry.captures import Capture, CaptureRequest, Prepared
from warpwatch_telemetry.jobs import JobId
from warpwatch_telemetry.records import RankSeen

TICKS_ARMED = 3
WORLD = 4
# The answer of a rank to the command of this id, or None for none.
Answers = Callable[[int, str], str | None]
# Whether the start step of the command of this id comes, or why the capture fails.
Records = Callable[[str], bool | str]


class PlayedAgent(MemoryAgent):
    """A node with some ranks of the job TRAIN."""

    def __init__(self, folder: Path, stack: ExitStack, number: int, run: Run) -> None:
        own = folder / f"gpu-{number + 1}"
        own.mkdir()
        super().__init__(own)
        self.name = own.name
        self.numbers = range(2 * number, 2 * number + 2)
        self.node = CaptureNode(own, stack, ranks=self.numbers, world_size=WORLD, run=run)
        self.address = ""
        self.is_heard = True
        self.ticks = 0
        # By rank, the command that it obeyed last; since when it is armed.
        self.obeyed: dict[int, str] = {}
        self.armed_at: dict[int, int] = {}

    def request_capture(
        self, request: CaptureRequest, name: str = "", start_step: int | None = None
    ) -> Capture:
        return self.node.service.request(self._own(request), name, start_step)

    def prepare_capture(self, request: CaptureRequest) -> Prepared:
        return self.node.service.prepare(self._own(request))

    def _own(self, request: CaptureRequest) -> CaptureRequest:
        """For the fleet its ranks may be another owner's than that of the test's files."""
        return replace(request, owner=TRAIN.owner)

    def cancel_capture(self, name: str) -> Capture | None:
        return self.node.service.cancel(name, "cancelled by the fleet")

    def capture_file(self, capture_id: str, name: str, owner: str | None) -> Path | None:
        return self.node.service.register.file(capture_id, name, owner)

    def captures(self) -> list[Capture]:
        return list(self.node.hub.state().captures)

    def play(self, answers: Answers, records: Records) -> None:
        """Ranks do as ``answers`` says with a command; who armed delivers some ticks later."""
        self.ticks += 1
        self.node.poll()
        for index, rank in enumerate(self.numbers):
            with contextlib.suppress(ValueError, KeyError, IndexError):
                command = self.node.command(index)
                if (command["op"], command["kind"]) == ("capture", "torch"):
                    self._obey(index, rank, command["id"], answers, records)
        self.node.poll()
        self.node.service.finish()

    def _obey(self, index: int, rank: int, name: str, answers: Answers, records: Records) -> None:
        before = self.obeyed.get(rank)
        if before == f"armed {name}":
            came = self.ticks >= self.armed_at[rank] + TICKS_ARMED and records(name)
            if came is True:
                self.node.deliver(index)
            elif came:
                self.node.answer(index, "capture_failed", detail=came)
            if came:
                self.obeyed[rank] = name
        elif before != name and (said := answers(rank, name)) is not None:
            self.node.answer(index, f"capture_{said}")
            self.armed_at[rank] = self.ticks
            self.obeyed[rank] = ("armed " if said == "armed" else "") + name

    def lines(self, after: str | None) -> list[bytes]:
        self.stream.put_captures(self.node.hub.state().captures)
        return sent(self.stream.portion(after), self.name, self.node.clock.wall())


class PlayedFleet:
    """A fleet's side of captures, over ``agents`` or two nodes with two ranks each."""

    def __init__(
        self,
        folder: Path,
        stack: ExitStack,
        agents: Sequence[PlayedAgent] = (),
        job: JobId = TRAIN,
        run: Run = read_here,
    ) -> None:
        self.clock = ManualClock()
        self._run = run
        self.agents = agents or [PlayedAgent(folder, stack, n, run) for n in range(2)]
        token = folder / "token"
        token.write_text("secret")
        self.config = AgentsConfig(token_file=token, allow_plain=True)
        self.cluster = TestCluster().cluster
        self.store = Store(StoreConfig(url=(folder / "fleet").as_uri()))
        self.board = FleetBoard(FleetMetrics())
        self.register = CaptureRegister(self.store, self.board)
        for agent in self.agents:
            if not agent.address:
                server = stack.enter_context(servers(agent))(token_file=token)
                agent.address = "{}:{}".format(*server.address)
        self.cluster.set_targets({one.address: Target(one.address) for one in self.agents})
        for agent in self.agents:
            agent.stream.portion(None)
            agent.stream.put(
                RankSeen(time=self.clock.wall(), rank=rank, world_size=WORLD, **job.fields())
                for rank in agent.numbers
            )
        self.hear()

    def hear(self) -> None:
        for agent in self.agents:
            node = self.cluster.nodes[agent.address]
            node.up = agent.is_heard
            node.reason = "" if agent.is_heard else "ConnectError"
            if agent.is_heard:
                lines = agent.lines(node.cursor)
                self.cluster.feed(agent.address, lines, self.clock.wall())

    def advance(self, seconds: float) -> None:
        self.clock.advance(seconds)
        for agent in self.agents:
            agent.node.clock.advance(seconds)

    def tick(
        self, answers: Answers = lambda rank, name: "armed", records: Records = lambda name: True
    ) -> None:
        for agent in self.agents:
            agent.play(answers, records)
        self.hear()

    def run(
        self,
        ask: Callable[[FleetCaptures], Any],
        answers: Answers = lambda rank, name: "armed",
        meanwhile: Callable[[], None] = lambda: None,
        records: Records = lambda name: True,
        changes: Sequence[Change] = (),
    ) -> FleetCaptures:
        """``ask``, and play until all captures have ended. ``changes``: changes of anomalies."""

        async def sleep(seconds: float) -> None:
            self.advance(seconds)
            self.tick(answers, records)
            meanwhile()
            self.hear()
            await asyncio.sleep(0)

        async def play() -> FleetCaptures:
            agents = HttpLinks(self.config, "fleet-0")
            captures = FleetCaptures(
                self.cluster, agents, TriggersConfig(), self.register, self.board, lambda: None,
                self.clock.monotonic, self.clock.wall, sleep, self._run,
            )  # fmt: skip
            captures.loop = asyncio.get_running_loop()
            try:
                asked = ask(captures)
                if asked is not None:
                    await asked
                await self._idle(captures)
                await self._trigger(captures, changes)
            finally:
                await agents.close()
            return captures

        return asyncio.run(play())

    async def _idle(self, captures: FleetCaptures) -> None:
        await captures.idle()
        await asyncio.to_thread(captures.service.finish)

    async def _trigger(self, captures: FleetCaptures, changes: Sequence[Change]) -> None:
        """Until nothing more is requested."""
        triggers, before = Triggers(captures, None, self.board), -1
        while changes and before != len(self.register.all()):
            before = len(self.register.all())
            now = self.clock.wall()
            await asyncio.to_thread(triggers.advance, now, changes, ())
            await self._idle(captures)
            await asyncio.to_thread(triggers.advance, now, (), ())
            await self._idle(captures)
