"""The condition GpuHealthy of nodes, and the taint of those that need service."""

import asyncio
import copy
import json
from typing import Any

import pytest

from tests.cases import cases
from tests.fleet.kubernetes.api_server import NODE, ApiServer
from tests.fleet.kubernetes.stand_in import StandIn
from tests.fleet.kubernetes.told import LINK, Told, fault
from tests.fleet.nodes import NOW, TestCluster, TestNode
from warpwatch_fleet.config import KubernetesConfig
from warpwatch_fleet.kubernetes.api import KubernetesError
from warpwatch_fleet.kubernetes.conditions import KEY, Conditions, Taints
from warpwatch_fleet.kubernetes.events import EventPublisher
from warpwatch_fleet.targets import Target

OTHER = {"key": "team", "value": "a", "effect": "NoSchedule"}
OWN = {"key": KEY, "value": "Xid", "effect": "NoSchedule"}
TAINTS = {"dry_run": False, "clear_after": 600}


@pytest.fixture
def told(server: ApiServer) -> Told:
    return Told(server, **TAINTS)


def put_taint(told: Told, taint: dict[str, str]) -> None:
    told.server.ask("PATCH", f"/api/v1/nodes/{NODE}", {"spec": {"taints": [taint]}})


def test_the_condition_says_which_fault_needs_service_and_since_when(told, golden):
    ready = {"conditions": [{"type": "Ready", "status": "True"}]}
    strategic = {"Content-Type": "application/strategic-merge-patch+json"}
    told.server.ask("PATCH", f"/api/v1/nodes/{NODE}/status", {"status": ready}, **strategic)
    seen = []
    # Warnings and faults of jobs change nothing; a second fault the message, not its time.
    for found in (
        (),
        (fault(2, severity="warning", summary="warm"), fault(4, kind="hang")),
        (fault(),),
        (fault(3, kind="row_remap", summary="rows are out"),),
        (fault(5, kind="device_needs_service", summary="XID 79, needs a reboot"),),
    ):
        told.find(*found)
        told.rounds(after_s=1)
        seen.append(json.dumps(told.condition(), sort_keys=True, indent=1))
    golden("fleet/conditions.txt", "\n".join(seen).encode())
    kept = {one["type"] for one in told.server.node()["status"]["conditions"]}
    assert kept == {"Ready", "GpuHealthy"}


def test_one_node_is_tainted_by_its_fault_and_free_when_it_is_well_again(told, golden):
    put_taint(told, OTHER)
    for node in (0, 1):
        told.find(fault(), node=node)
    told.rounds()
    # Another fleet knows from the cluster that there is one.
    told.rounds()
    assert told.taints() == [OTHER, OWN]
    assert told.taints("gpu-2") == []
    told.find(fault(end_time=NOW))
    told.rounds(2)
    # It keeps its taint until it has been well for long enough.
    told.cluster.now += TAINTS["clear_after"] - 1
    told.rounds(2)
    assert told.condition()["status"] == "True"
    assert OWN in told.taints()
    told.cluster.now += 1
    told.rounds(2)
    assert told.taints() == [OTHER]
    assert KEY not in told.server.node()["metadata"].get("labels", {})
    assert told.taints("gpu-2") == [OWN]
    lines = [
        f"{one['type']} {one['reason']} of {one['involvedObject']['name']}: {one['message']}"
        for one in told.server.events()
    ]
    golden("fleet/events.txt", "\n".join(sorted(lines)).encode())


class DirectApi:
    """The stand-in without a network, and what it is asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.server = StandIn.__new__(StandIn)
        self.server.objects = {"/api/v1/namespaces/default": {}}
        self.server.version = self.server.conflicts = self.server.failing = 0
        for name in (NODE, "gpu-2"):
            one = {"metadata": {"name": name}, "spec": {}, "status": {}}
            self.server._save(f"/api/v1/nodes/{name}", one)

    async def ask(
        self, method: str, path: str, body: Any = None, form: str = "", params: Any = None, **_: Any
    ) -> Any:
        self.asked.append(f"    {method} {path} {params or ''}{json.dumps(body) if body else ''}\n")
        status, said, body = self.server.failing, {"message": "failing"}, copy.deepcopy(body)
        if not status and method == "PATCH":
            status, said = self.server._patch(path, body, "strategic" in form)
        elif not status and method == "POST":
            status, said = self.server._post(path, body)
        elif not status:
            status, said = self.server._get(path, (params or {}).get("labelSelector"))
        if status >= 300:
            raise KubernetesError(status, f"{status}: {said['message']}")
        return copy.deepcopy(said)


class Rounds:
    """A fleet that asks the API server of its cluster."""

    def __init__(self, conditions: bool = True, **own: Any) -> None:
        self.api: Any = DirectApi()
        self.server: StandIn = self.api.server
        self.nodes: tuple[TestNode, ...] = TestNode(NODE), TestNode("gpu-2")
        self.cluster = TestCluster(*self.nodes)
        self.has_conditions = conditions
        self.config = KubernetesConfig(conditions=True, taints=True, **own)
        self.restart()

    def restart(self) -> None:
        about = (self.api, self.cluster.cluster)
        self.events = EventPublisher(*about, LINK, lambda: self.cluster.now)
        self.conditions = Conditions(*about, lambda: self.cluster.now)
        self.taints = Taints(
            self.api, self.config, self.conditions, self.events, lambda: self.cluster.now
        )

    def find(self, about: dict[str, Any]) -> None:
        node, ends = self.nodes[about.pop("node")], about.pop("ends", None)
        end_time = None if ends is None else self.cluster.now - ends
        node.stream.put_anomaly(fault(**about | {"end_time": end_time}))
        self.cluster.hear(node)

    def passes(self, seconds: float, heard: int = 2) -> None:
        """heard: how many agents go on; -1: none, and each is down."""
        self.cluster.now += seconds
        if heard > 0:
            self.cluster.hear(*self.nodes[:heard])
        for node in list(self.cluster.cluster.nodes.values())[max(heard, 0) :]:
            node.up = False

    def taint(self, name: str, key: str) -> None:
        node = self.server.objects[f"/api/v1/nodes/{name}"]
        node["spec"]["taints"] = [{"key": key, "value": "x", "effect": "NoSchedule"}]
        node["metadata"]["labels"] = {key: "x"}

    def gone(self, path: str) -> None:
        self.server._delete(path)

    def sets(self, what: str, value: int) -> None:
        setattr(self.server, what, value)

    def target(self, number: int) -> None:
        self.nodes = (self.nodes[number],)
        self.cluster.cluster.set_targets({one.address: Target(one.address) for one in self.nodes})

    def owner(self, number: int) -> None:
        targets = {one.address: Target(one.address) for one in self.nodes}
        address = self.nodes[number].address
        targets[address] = Target(address, {"owner": "ns/team"})
        self.cluster.cluster.set_targets(targets)

    async def round(self, of_others: int = 0) -> list[Any]:
        found: list[Any] = []
        works: list[Any] = [self.conditions.advance, lambda: self.taints.advance(of_others)]
        for work in (*(works if self.has_conditions else ()), self.events.advance):
            try:
                found.append(await work())
            except KubernetesError as error:
                found.append(str(error))
        return found


@pytest.mark.parametrize("name", ROUNDS := cases(__file__)["rounds"])
def test_what_a_fleet_asks_of_the_api_server_is_golden(name, golden_case, monkeypatch):
    about = ROUNDS[name]
    if most := about.get("most"):
        monkeypatch.setattr("warpwatch_fleet.kubernetes.conditions.MAX_PER_ROUND", most)
    rounds, lines = Rounds(**about["own"]), list[str]()
    for what, *arguments in about["script"]:
        lines.append(f"{what} {arguments}\n")
        if found := getattr(rounds, what)(*arguments):
            lines.append(f"  {asyncio.run(found)}\n")
        lines += rounds.api.asked
        rounds.api.asked.clear()
    golden_case("".join(lines), name)


@pytest.mark.parametrize("is_removed", [False, True])
def test_of_a_node_whose_agent_is_away_the_condition_is_unknown(told, is_removed):
    seen = []

    def leave() -> None:
        seen.append((told.condition()["status"], told.condition()["reason"]))
        if is_removed:
            told.cluster.cluster.set_targets({})
        told.cluster.now += 1

    told.rounds(2, leave, after_s=60)
    assert seen == [("True", "NoFault"), ("Unknown", "AgentAway")]
    assert told.taints() == []


def test_a_dry_run_taints_nothing_and_says_what_it_would_do(server: ApiServer) -> None:
    told = Told(server, dry_run=True)
    for node in (0, 1):
        told.find(fault(), node=node)
    told.rounds(3)
    assert told.taints() == told.taints("gpu-2") == []
    assert {"WouldTaint", "NotTainted"} <= told.reasons()

    def leave() -> None:
        told.cluster.cluster.set_targets({told.nodes[1].address: Target(told.nodes[1].address)})
        told.cluster.now += 3601
        told.cluster.hear(told.nodes[1])

    told.rounds(2, leave)
    events = [one for one in server.events() if one["reason"] == "WouldTaint"]
    assert {one["involvedObject"]["name"] for one in events} == {NODE, "gpu-2"}


def test_a_changed_condition_comes_before_those_that_are_read_again(told, monkeypatch):
    monkeypatch.setattr("warpwatch_fleet.kubernetes.conditions.MAX_PER_ROUND", 2)
    monkeypatch.setattr("warpwatch_fleet.kubernetes.conditions.KNOWN_S", -1.0)
    told.rounds(3, lambda: (told.find(fault(), node=1), told.cluster.hear()))
    assert told.condition("gpu-2")["status"] == "False"


def test_a_taint_that_a_person_took_away_or_put_there_is_left_alone(told: Told) -> None:
    foreign = OWN | {"value": "by-hand"}
    put_taint(told, foreign)
    told.rounds(2)
    assert told.taints() == [foreign]
    put_taint(told, OTHER)
    told.find(fault())
    told.rounds()
    assert told.taints() == [OTHER, OWN]
    put_taint(told, OTHER)
    told.rounds(2)
    assert told.taints() == [OTHER]
