"""A fleet of two nodes that tells the API server what it has found."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from tests.fleet.kubernetes.api_server import NODE, ApiServer
from tests.fleet.nodes import TestCluster, TestNode
from warpwatch_fleet.kubernetes.api import Api
from warpwatch_fleet.kubernetes.events import Events
from warpwatch_telemetry.anomalies import Anomaly

LINK = "https://warpwatch.example.com"


def fault(number: int = 1, **fields: Any) -> Anomaly:
    about: dict[str, Any] = {"kind": "xid", "severity": "critical", "device": "GPU-0"}
    about |= {"summary": "XID 79: the GPU has fallen off the bus", "time": time.time() - 5}
    return Anomaly(id=f"20261123T01-{number}", **about | fields)


class Told:
    """A fleet of two nodes; ``restart`` is another one in its place."""

    def __init__(self, server: ApiServer) -> None:
        self.server = server
        self.nodes = TestNode(NODE), TestNode("gpu-2")
        self.cluster = TestCluster(*self.nodes)
        self.cluster.now = time.time()
        self.shard = (0, 1)
        self.more: Callable[[Events], None] = lambda events: None

    def rounds(self, count: int = 1) -> list[Any]:
        """What the API server has after so many rounds of a fleet that has just begun."""
        self.cluster.hear()

        async def tell() -> None:
            api = Api(self.server.folder)
            events = Events(api, self.cluster.cluster, self.shard, LINK)
            try:
                for _ in range(count):
                    await events.advance()
                    self.more(events)
            finally:
                await api.close()

        asyncio.run(tell())
        return self.server.events()
