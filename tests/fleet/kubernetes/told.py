"""A fleet of two nodes that tells the API server what it has found, and how its nodes are."""

import asyncio
from collections.abc import Callable
from typing import Any

from tests.fleet.kubernetes.api_server import NODE, ApiServer
from tests.fleet.nodes import NOW, TestCluster, TestNode
from warpwatch_fleet.config import KubernetesConfig
from warpwatch_fleet.kubernetes.api import KubernetesClient
from warpwatch_fleet.kubernetes.conditions import Conditions, Taints
from warpwatch_fleet.kubernetes.events import EventPublisher
from warpwatch_telemetry.anomalies import Anomaly

LINK = "https://warpwatch.example.com"


def fault(number: int = 1, **fields: Any) -> Anomaly:
    about: dict[str, Any] = {"kind": "xid", "severity": "critical", "device": "GPU-0"}
    about |= {"summary": "XID 79 (GPU has fallen off the bus)", "gpu": 2, "time": NOW - 5}
    return Anomaly(id=f"20261123T01-{number}", **about | fields)


class Told:
    """``rounds`` are of another fleet each time. own: its configuration; only Events without."""

    def __init__(self, server: ApiServer, **own: Any) -> None:
        self.server = server
        self.nodes = TestNode(NODE), TestNode("gpu-2")
        self.cluster = TestCluster(*self.nodes)
        self.own = own

    def find(self, *faults: Anomaly, node: int = 0) -> None:
        for one in faults:
            self.nodes[node].stream.put_anomaly(one)

    def rounds(
        self, count: int = 1, between: Callable[[], None] = lambda: None, after_s: float = 0.0
    ) -> list[Any]:
        """Return the API server's objects after ``count`` rounds, ``after_s`` after a report."""
        self.cluster.hear()
        self.cluster.now += after_s

        def wall() -> float:
            return self.cluster.now

        async def work() -> None:
            api = KubernetesClient(self.server.folder)
            config = KubernetesConfig(conditions=True, taints=True, **self.own)
            events = EventPublisher(api, self.cluster.cluster, LINK, wall)
            conditions = Conditions(api, self.cluster.cluster, wall)
            taints = Taints(api, config, conditions, events, wall)
            try:
                for _ in range(count):
                    if self.own:
                        await conditions.advance()
                        await taints.advance(0)
                    await events.advance()
                    between()
            finally:
                await api.close()

        asyncio.run(work())
        return self.server.events()

    def condition(self, node: str = NODE) -> Any:
        listed = self.server.node(node)["status"].get("conditions", [])
        return next((one for one in listed if one["type"] == "GpuHealthy"), None)

    def taints(self, node: str = NODE) -> list[Any]:
        taints: list[Any] = self.server.node(node)["spec"].get("taints", [])
        # A real server adds one of its own to a node that is not ready.
        return [one for one in taints if not one["key"].startswith("node.kubernetes.io/")]

    def reasons(self) -> set[str]:
        return {one["reason"] for one in self.server.events()}
