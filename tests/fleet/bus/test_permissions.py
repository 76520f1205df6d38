"""The permissions of docs/fleet.md, enforced by a real server."""

import asyncio
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nkeys
import pytest

from tests.fleet.bus.server import Fabric, NatsServer, until
from tests.fleet.nodes import TestNode
from tests.manual_clock import ManualClock
from warpwatch_fleet.bus.worker import BusSource
from warpwatch_fleet.config import FleetFile
from warpwatch_runtime.bus import Bus, BusConfig, BusError
from warpwatch_telemetry import bus_messages as said
from warpwatch_telemetry.bus_messages import Publisher, token

DOCS = Path(__file__).resolve().parents[3] / "docs" / "fleet.md"
WHO = ("SETUP", "WORKER", "AGENT", "TENANT")


def permissions() -> str:
    """The users of the documentation."""
    (found,) = re.findall(r"```\n(authorization .*?)```", DOCS.read_text(), flags=re.DOTALL)
    assert isinstance(found, str)
    return found.replace("NODE", token("gpu-1")).replace("OWNER", token("ns/own"))


class Site:
    """A server with these users, and the file of each one's key."""

    def __init__(self, folder: Path) -> None:
        self.files: dict[str, Path] = {}
        settings = permissions()
        for who in WHO:
            seed = nkeys.encode_seed(os.urandom(32), nkeys.PREFIX_BYTE_USER)
            public = nkeys.from_seed(bytearray(seed)).public_key.decode()
            settings = settings.replace(f"KEY_OF_{who}", public)
            self.files[who] = folder / who
            self.files[who].write_bytes(bytes(seed))
        self.server = NatsServer(folder, settings)

    def config(self, who: str) -> BusConfig:
        return BusConfig(url=self.server.url, nkey_file=self.files[who])

    def bus(self, who: str, name: str) -> Bus:
        return Bus(self.config(who), name)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    site = Site(tmp_path_factory.mktemp("nats"))
    fabric = Fabric(site.server)
    fabric.config = site.config("SETUP")
    asyncio.run(fabric.create())
    yield site
    site.server.kill()


def test_an_agent_speaks_and_answers_for_itself_alone(site, monkeypatch):
    # The server does not answer a refused request.
    monkeypatch.setattr("warpwatch_runtime.bus.REPLY_S", 0.3)

    async def test() -> None:
        node, tenant = Publisher("gpu-1"), Publisher("pod-1", "ns/own")
        agent = site.bus("AGENT", f"agent.node.{token('gpu-1')}")
        sidecar = site.bus("TENANT", f"agent.{tenant.token}.{token('pod-1')}")
        for bus in (agent, sidecar):
            await bus.connect()
        await agent.publish(said.node_subject(node), b"", "a-1")
        await agent.publish(said.records_subject(5, node), b"", "a-2")
        await sidecar.publish(said.records_subject(5, tenant), b"", "a-3")
        for bus, who in (
            (agent, Publisher("gpu-2")), (agent, tenant), (sidecar, node),
            (sidecar, Publisher("pod-1", "ns/other")),
        ):  # fmt: skip
            with pytest.raises(BusError):
                await bus.publish(said.records_subject(5, who), b"", "a-4")
        with pytest.raises(BusError):
            await agent.publish("$KV.warpwatch-sessions.a", b"{}", "a-5")
        with pytest.raises(BusError):
            await agent.request("$JS.API.STREAM.INFO.WARPWATCH", b"", 0.3)

        async def answer(operation: str, body: bytes) -> bytes:
            return b"x" * 2**20

        await agent.serve(node.requests, answer)
        await sidecar.serve(tenant.requests, answer)
        # Neither hears the requests or the replies of others.
        heard: list[bytes] = []
        for subject in (f"{tenant.requests}.>", f"{said.INBOX}.>", "_INBOX.>", "$KV.>"):
            await agent.listen(subject, heard.append)
        config = FleetFile.model_validate({"bus": site.config("WORKER")})
        worker = BusSource(config, lambda told: None)
        await worker.start()
        for who in (node, tenant):
            parts = await worker.bus.request(f"{who.requests}.get.A", b"", 5.0)
            assert len(parts) == 2**20
        await agent.client.flush()
        assert heard == []
        await worker.close()
        for bus in (agent, sidecar):
            await bus.close()

    asyncio.run(test())


def test_a_worker_needs_no_other_rights(site):
    async def test() -> None:
        config = FleetFile.model_validate({"bus": site.config("WORKER")})
        worker = BusSource(config, lambda told: None)
        await worker.start()
        fabric = Fabric(site.server)
        fabric.config = site.config("AGENT")
        node = TestNode("gpu-1")
        agent = await fabric.agent(node, time.time, ManualClock().monotonic)

        async def work() -> Any:
            await agent.advance()
            for _, one in worker.rounds:
                await one()
            await worker.evaluate()

        await until(lambda: "gpu-1" in worker.view.nodes and not worker.missing, work)
        await worker.sessions.put("a", b"{}")
        assert (await worker.sessions.get("a") or ())[:1] == (b"{}",)
        with pytest.raises(BusError, match="wrong last sequence"):
            await worker.sessions.remove("a", 10**6)
        await worker.sessions.remove("a")
        assert await worker.sessions.get("a") is None
        await worker.close()
        await fabric.close()

    asyncio.run(test())
