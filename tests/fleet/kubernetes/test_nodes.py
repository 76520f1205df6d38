"""The condition GpuHealthy of nodes, and the taint of those that need service."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from tests.fleet.kubernetes.api_server import NODE, ApiServer
from tests.fleet.kubernetes.stand_in import StandIn
from tests.fleet.kubernetes.told import fault
from tests.fleet.nodes import TestCluster, TestNode
from warpwatch_fleet.config import KubernetesConfig
from warpwatch_fleet.kubernetes.api import Api, ApiError
from warpwatch_fleet.kubernetes.conditions import AWAY_S, Conditions
from warpwatch_fleet.kubernetes.events import Events
from warpwatch_fleet.kubernetes.taints import KEY, Taints

OTHER = {"key": "team", "value": "a", "effect": "NoSchedule"}


class Served:
    """A fleet of two nodes that says how they are; each ``rounds`` is another fleet."""

    def __init__(self, server: ApiServer) -> None:
        self.server = server
        self.nodes = TestNode(NODE), TestNode("gpu-2")
        self.cluster = TestCluster(*self.nodes)
        self.config: dict[str, Any] = {"dry_run": False, "clear_after": 0}

    def rounds(self, count: int = 1, away_s: float = 0.0) -> None:
        self.cluster.now = time.time() - away_s
        self.cluster.hear()

        async def work() -> None:
            api = Api(self.server.folder)
            config = KubernetesConfig(conditions=True, taints=True, **self.config)
            events = Events(api, self.cluster.cluster, (0, 1), "")
            conditions = Conditions(api, self.cluster.cluster)
            taints = Taints(api, config, conditions, events)
            try:
                for _ in range(count):
                    await conditions.advance()
                    await taints.advance()
                    await events.advance()
            finally:
                await api.close()

        asyncio.run(work())

    def condition(self, node: str = NODE) -> Any:
        listed = self.server.node(node)["status"].get("conditions", [])
        found = [one for one in listed if one["type"] == "GpuHealthy"]
        return found[0] if found else None

    def taints(self, node: str = NODE) -> list[Any]:
        taints: list[Any] = self.server.node(node)["spec"].get("taints", [])
        # A real server adds one of its own to a node that is not ready.
        return [one for one in taints if not one["key"].startswith("node.kubernetes.io/")]

    def told(self) -> set[str]:
        return {one["reason"] for one in self.server.events()}


@pytest.fixture
def served(server: ApiServer) -> Served:
    return Served(server)


def test_the_condition_says_which_fault_needs_service_and_since_when(served: Served) -> None:
    ready = {"conditions": [{"type": "Ready", "status": "True"}]}
    strategic = {"Content-Type": "application/strategic-merge-patch+json"}
    served.server.ask("PATCH", f"/api/v1/nodes/{NODE}/status", {"status": ready}, **strategic)
    served.rounds()
    well = served.condition()
    assert (well["status"], well["reason"]) == ("True", "NoFault")
    served.nodes[0].stream.put_anomaly(fault(2, severity="warning", summary="warm"))
    served.rounds()
    assert served.condition() == well
    served.nodes[0].stream.put_anomaly(fault())
    served.rounds()
    ill = served.condition()
    assert (ill["status"], ill["reason"]) == ("False", "Xid")
    assert "XID 79" in ill["message"]
    # A second fault changes what is said, not since when.
    served.nodes[0].stream.put_anomaly(fault(3, kind="row_remap", summary="rows are out"))
    served.rounds()
    more = served.condition()
    assert more["message"].endswith("; rows are out")
    assert more["lastTransitionTime"] == ill["lastTransitionTime"]
    kept = {one["type"] for one in served.server.node()["status"]["conditions"]}
    assert kept == {"Ready", "GpuHealthy"}


def test_of_a_node_whose_agent_is_away_the_condition_is_unknown(served: Served) -> None:
    served.rounds(away_s=AWAY_S + 5)
    assert (served.condition()["status"], served.condition()["reason"]) == ("Unknown", "AgentAway")
    assert served.taints() == []


def test_a_dry_run_taints_nothing_and_says_what_it_would_do(served: Served) -> None:
    served.config = {}
    for node in served.nodes:
        node.stream.put_anomaly(fault())
    served.rounds(3)
    assert served.taints() == served.taints("gpu-2") == []
    assert {"WouldTaint", "NotTainted"} <= served.told()


def test_one_node_is_tainted_by_its_fault_and_free_when_it_is_well_again(served: Served) -> None:
    spec = {"spec": {"taints": [OTHER]}}
    served.server.ask("PATCH", f"/api/v1/nodes/{NODE}", spec)
    for node in served.nodes:
        node.stream.put_anomaly(fault())
    served.rounds()
    # Another fleet knows from the cluster that there is one.
    served.rounds()
    own = {"key": KEY, "value": "Xid", "effect": "NoSchedule"}
    assert served.taints() == [OTHER, own]
    assert served.taints("gpu-2") == []
    assert {"Tainted", "NotTainted"} <= served.told()
    served.nodes[0].stream.put_anomaly(fault(end_time=time.time()))
    served.rounds(2)
    assert served.taints() == [OTHER]
    assert KEY not in served.server.node()["metadata"].get("labels", {})
    assert served.taints("gpu-2") == [own]


def test_a_node_keeps_its_taint_until_it_has_been_well_for_long_enough(served: Served) -> None:
    served.nodes[0].stream.put_anomaly(fault())
    served.rounds()
    served.config["clear_after"] = 3600
    served.nodes[0].stream.put_anomaly(fault(end_time=time.time()))
    served.rounds(2)
    assert served.condition()["status"] == "True"
    assert len(served.taints()) == 1


def test_a_taint_that_a_person_took_away_stays_away(served: Served) -> None:
    served.nodes[0].stream.put_anomaly(fault())
    served.rounds()
    served.server.ask("PATCH", f"/api/v1/nodes/{NODE}", {"spec": {"taints": [OTHER]}})
    served.rounds(2)
    assert served.taints() == [OTHER]


def test_a_taint_that_is_not_its_own_is_left_alone(served: Served) -> None:
    foreign = {"key": KEY, "value": "by-hand", "effect": "NoSchedule"}
    served.server.ask("PATCH", f"/api/v1/nodes/{NODE}", {"spec": {"taints": [foreign]}})
    served.rounds(2)
    assert served.taints() == [foreign]


def test_nodes_that_the_cluster_does_not_have_are_left_alone(stand_in: StandIn) -> None:
    served = Served(stand_in)
    stand_in.ask("DELETE", "/api/v1/nodes/gpu-2")
    served.rounds(3)
    assert served.condition()["status"] == "True"
    assert stand_in.asked.count("GET /api/v1/nodes/gpu-2") == 1


def test_a_node_that_another_has_changed_is_tainted_in_the_next_round(stand_in: StandIn) -> None:
    served = Served(stand_in)
    served.nodes[0].stream.put_anomaly(fault())
    stand_in.conflicts = 1
    with pytest.raises(ApiError, match="409: the object"):
        served.rounds()
    served.rounds()
    assert len(served.taints()) == 1
