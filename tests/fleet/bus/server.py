"""A real nats-server on loopback, agents that publish real streams, and workers in one loop."""

import asyncio
import shutil
import signal
import subprocess
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from tests.fleet.nodes import TestNode
from tests.waiting import DEADLINE_S, eventually, is_listening
from warpwatch_daemon.demo.processes import free_port
from warpwatch_daemon.for_fleet.bus import RecordPublisher
from warpwatch_fleet.bus.worker import BusSource
from warpwatch_fleet.cli import _create_streams
from warpwatch_fleet.config import FleetFile
from warpwatch_runtime.agent_metrics import AgentMetrics
from warpwatch_runtime.bus import Bus, BusConfig
from warpwatch_telemetry.anomalies import Anomaly
from warpwatch_telemetry.bus_messages import Publisher, token

NATS = shutil.which("nats-server") or "/usr/sbin/nats-server"


class NatsServer:
    """``port`` stays the same over ``start`` and ``kill``. settings: more lines of its file."""

    def __init__(self, folder: Path, settings: str = "") -> None:
        self._folder, self._file = folder, folder / "nats.conf"
        self.port = free_port()
        self._settings = settings
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    def start(self) -> None:
        self._text = (
            f'listen: "127.0.0.1:{self.port}"\nlog_file: "{self._folder / "nats.log"}"\n'
            f'jetstream {{store_dir: "{self._folder / "store"}"}}\n{self._settings}'
        )
        self._file.write_text(self._text)
        self._process = subprocess.Popen([NATS, "-c", str(self._file)])
        eventually(lambda: is_listening(self.port), "nats-server does not start")

    def reload(self, more: str) -> None:
        self._file.write_text(self._text + more)
        assert self._process is not None
        self._process.send_signal(signal.SIGHUP)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


class Fabric:
    """Agents and workers on one bus, in one event loop."""

    def __init__(self, server: NatsServer, **security: Any) -> None:
        self.config = BusConfig(url=server.url, **security)
        self.told: list[Anomaly] = []
        self._open: list[Bus | BusSource] = []

    async def close(self) -> None:
        for one in self._open:
            await one.close()

    async def create(self) -> None:
        assert await asyncio.to_thread(_create_streams, self.config, 1) == 0

    def worker(self, monotonic: Callable[[], float]) -> BusSource:
        config = FleetFile.model_validate({"bus": self.config})
        source = BusSource(config, self.told.extend, monotonic=monotonic)
        self._open.append(source)
        return source

    async def agent(
        self, node: TestNode, wall: Callable[[], float], monotonic: Callable[[], float]
    ) -> RecordPublisher:
        who = Publisher(node.name)
        bus = Bus(self.config, f"agent.{who.token}.{token(node.name)}")
        await bus.connect()
        self._open.append(bus)
        return RecordPublisher(node.stream, bus, who, "0.3.0", AgentMetrics(), monotonic, wall)


async def until(done: Callable[[], Any], work: Callable[[], Awaitable[Any]]) -> None:
    """Repeat the work until it is done."""
    async with asyncio.timeout(DEADLINE_S):
        while not done():
            await work()
            await asyncio.sleep(0.02)
