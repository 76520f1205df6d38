"""Anomalies as Events on nodes and pods."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import Any

import pytest

from tests.fleet.kubernetes.api_server import NODE, ApiServer
from tests.fleet.kubernetes.stand_in import StandIn
from tests.fleet.kubernetes.told import LINK, Told, fault
from tests.fleet.nodes import seen
from warpwatch_daemon.state.agent_metrics import AgentMetrics
from warpwatch_fleet.config import FleetConfig, KubernetesConfig
from warpwatch_fleet.kubernetes.api import ApiError
from warpwatch_fleet.kubernetes.events import MAX_NOTE, MAX_PER_ROUND, Events
from warpwatch_fleet.kubernetes.tasks import Kubernetes
from warpwatch_telemetry.anomalies import Anomaly


@pytest.fixture
def told(server: ApiServer) -> Told:
    return Told(server)


def test_a_fault_of_a_gpu_is_one_event_on_its_node_until_it_is_over(told: Told) -> None:
    stream = told.nodes[0].stream
    stream.put_anomaly(fault())
    (event,) = told.rounds(2)
    assert event["involvedObject"]["kind"] == "Node"
    assert (event["involvedObject"]["name"], event["metadata"]["namespace"]) == (NODE, "default")
    assert (event["type"], event["reason"]) == ("Warning", "Xid")
    assert event["message"] == f"XID 79: the GPU has fallen off the bus {LINK}"
    stream.put_anomaly(fault(summary="XID 79, and 94"))
    (changed,) = told.rounds()
    assert changed["message"] == f"XID 79, and 94 {LINK}"
    stream.put_anomaly(fault(summary="XID 79, and 94", end_time=time.time()))
    (over,) = told.rounds()
    assert over["message"].startswith("over after ")
    assert over["metadata"]["uid"] == event["metadata"]["uid"]


def test_what_lasts_is_told_again_before_the_server_forgets_it(told: Told) -> None:
    told.nodes[0].stream.put_anomaly(fault(time=time.time() - 4000))
    (event,) = told.rounds()
    assert event["count"] == 3
    assert event["firstTimestamp"] < event["lastTimestamp"]


def test_an_event_that_the_server_has_forgotten_is_made_anew(told: Told) -> None:
    told.nodes[0].stream.put_anomaly(fault())

    def forget(events: Events) -> None:
        told.server.ask("DELETE", "/api/v1/namespaces/default/events")
        told.nodes[0].stream.put_anomaly(fault(summary="XID 94"))
        told.cluster.hear()

    told.more = forget
    told.rounds(2)
    told.more = lambda events: None
    (event,) = told.rounds()
    assert event["message"].startswith("XID 94")


def straggler(**fields: Any) -> Anomaly:
    about: dict[str, Any] = {"kind": "straggler", "severity": "warning", "owner": "ns/team"}
    return replace(fault(), **about | {"job": "llama", "run": "41", "rank": 1} | fields)


def test_an_anomaly_of_a_rank_is_on_its_pod(told: Told) -> None:
    for rank, node in enumerate(told.nodes):
        node.say(seen(rank, world=2, pod=f"llama-{rank}", pod_uid=f"0a1b-{rank}"))
    told.nodes[1].stream.put_anomaly(straggler())
    (event,) = told.rounds()
    assert event["involvedObject"]["namespace"] == "team"
    assert event["involvedObject"]["name"] == "llama-1"
    assert event["involvedObject"]["uid"] == "0a1b-1"


@pytest.mark.parametrize("wrong", ["ns/a/../b", "uid/1000", "ns/Team", "ns/"])
def test_of_an_owner_that_is_no_namespace_nothing_is_told(told: Told, wrong: str) -> None:
    told.nodes[0].say(seen(0, world=2, owner=wrong, pod="llama-0", pod_uid="0a1b"))
    told.nodes[0].stream.put_anomaly(straggler(rank=0, owner=wrong))
    assert told.rounds() == []


def test_of_several_fleets_one_tells(told: Told) -> None:
    for rank, node in enumerate(told.nodes):
        node.say(seen(rank, world=2, pod=f"llama-{rank}", pod_uid=f"0a1b-{rank}"))
    told.nodes[0].stream.put_anomaly(fault())
    told.nodes[1].stream.put_anomaly(straggler())
    by: dict[str, int] = {}
    for index in range(3):
        told.shard = (index, 3)
        told.rounds()
        for event in told.server.events():
            by.setdefault(event["reason"], index)
    assert by["Xid"] == 0
    assert set(by) == {"Xid", "Straggler"}


def test_a_flood_is_told_a_few_at_a_time_and_a_long_text_is_cut(told: Told) -> None:
    for number in range(MAX_PER_ROUND + 5):
        told.nodes[0].stream.put_anomaly(fault(number, summary="x" * 3000))
    assert len(told.rounds()) == MAX_PER_ROUND
    events = told.rounds(2)
    assert len(events) == MAX_PER_ROUND + 5
    assert max(len(one["message"]) for one in events) <= MAX_NOTE


def test_a_namespace_that_is_gone_holds_up_no_other_event(told: Told) -> None:
    told.nodes[0].say(seen(0, world=2, owner="ns/gone", pod="llama-0", pod_uid="0a1b"))
    told.nodes[0].stream.put_anomaly(straggler(rank=0, owner="ns/gone"))
    told.nodes[0].stream.put_anomaly(fault(2))
    with pytest.raises(ApiError, match="404: "):
        told.rounds()
    assert "Xid" in {one["reason"] for one in told.server.events()}


def test_a_server_that_is_away_is_told_later(stand_in: StandIn) -> None:
    told = Told(stand_in)
    told.nodes[0].stream.put_anomaly(fault())
    stand_in.failing = 503
    with pytest.raises(ApiError, match="503: try again"):
        told.rounds()
    stand_in.failing = 0
    assert len(told.rounds()) == 1
    assert stand_in.asked[-1] == "POST /api/v1/namespaces/default/events"


def test_what_a_server_does_not_take_is_counted_by_what_it_is(stand_in: StandIn) -> None:
    told, metrics = Told(stand_in), AgentMetrics()
    no_captures: Any = None
    told.nodes[0].stream.put_anomaly(fault())
    told.cluster.hear()
    own = KubernetesConfig(
        events=True, conditions=True, taints=True, service_account=stand_in.folder
    )
    fleet = Kubernetes(FleetConfig(kubernetes=own), told.cluster.cluster, no_captures, metrics)

    def counted(what: str) -> float | None:
        name = "warpwatch_fleet_kubernetes_errors_total"
        return metrics.registry.get_sample_value(name, {"what": what})

    assert [counted(what) for what in ("events", "conditions", "taints")] == [0.0, 0.0, 0.0]
    stand_in.failing = 503

    async def until_all_have_failed() -> None:
        running = asyncio.create_task(fleet.run())
        try:
            async with asyncio.timeout(60):
                while not all(map(counted, ("events", "conditions", "taints"))):
                    await asyncio.sleep(0.05)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    asyncio.run(until_all_have_failed())
