"""The condition GpuHealthy of nodes, and the taint of those that need service."""

import json

import pytest

from tests.fleet.kubernetes.api_server import NODE, ApiServer
from tests.fleet.kubernetes.stand_in import StandIn
from tests.fleet.kubernetes.told import Told, fault
from tests.fleet.nodes import NOW
from warpwatch_fleet.kubernetes.api import KubernetesError
from warpwatch_fleet.kubernetes.conditions import KEY
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


def test_a_node_that_the_cluster_does_not_have_is_asked_for_again_much_later(stand_in):
    told = Told(stand_in, **TAINTS)
    stand_in.ask("DELETE", "/api/v1/nodes/gpu-2")
    told.find(fault(), node=1)

    def later() -> None:
        told.cluster.now += 300
        told.cluster.hear()

    told.rounds(3, later)
    assert told.condition()["status"] == "True"
    assert stand_in.asked.count("GET /api/v1/nodes/gpu-2") == 1
    told.rounds(4, later)
    assert stand_in.asked.count("GET /api/v1/nodes/gpu-2") == 3


def test_a_node_that_another_has_changed_is_tainted_in_the_next_round(stand_in: StandIn) -> None:
    told = Told(stand_in, **TAINTS)
    told.find(fault())
    stand_in.conflicts = 1
    with pytest.raises(KubernetesError, match="409: the object"):
        told.rounds()
    told.rounds()
    assert told.taints() == [OWN]
