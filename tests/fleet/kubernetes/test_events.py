"""Anomalies as Events on nodes and pods."""

import asyncio
import gc
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from tests.fleet.kubernetes.api_server import NODE, ApiServer
from tests.fleet.kubernetes.told import LINK, Told, fault
from tests.fleet.nodes import NOW, seen
from warpwatch_fleet.config import FleetConfig, KubernetesConfig
from warpwatch_fleet.kubernetes.api import KubernetesClient, KubernetesError, timestamp
from warpwatch_fleet.kubernetes.events import EventPublisher
from warpwatch_fleet.kubernetes.tasks import Kubernetes
from warpwatch_runtime.agent_metrics import AgentMetrics
from warpwatch_telemetry.anomalies import Anomaly


@pytest.fixture
def told(server: ApiServer) -> Told:
    return Told(server)


def straggler(**fields: Any) -> Anomaly:
    about: dict[str, Any] = {"kind": "straggler", "severity": "warning", "owner": "ns/team"}
    return replace(fault(), **about | {"job": "llama", "run": "41", "rank": 1} | fields)


def in_pods(told: Told) -> None:
    for rank, node in enumerate(told.nodes, 1):
        # The process is not the first one of its rank.
        node.say(seen(rank, world=3, pod="llama-0", pod_uid="0a1b", time=NOW - 60))
        node.say(seen(rank, world=3, pod=f"llama-{rank}", pod_uid=f"0a1b-{rank}"))


def test_a_fault_of_a_gpu_is_one_event_on_its_node_until_it_is_over(told):
    told.find(fault())
    (event,) = told.rounds(2)
    assert event["involvedObject"]["kind"] == "Node"
    assert (event["involvedObject"]["name"], event["metadata"]["namespace"]) == (NODE, "default")
    assert (event["type"], event["reason"]) == ("Warning", "Xid")
    link = f"{LINK}/?show=20261123T01-1%40{NODE}#findings"
    said = f"XID 79 (GPU has fallen off the bus): GPU 2 on {NODE}, since 14:13 UTC on 21 Sep {link}"
    assert event["message"] == said
    assert (event["count"], event["firstTimestamp"]) == (1, timestamp(NOW - 5))
    told.find(fault(summary="XID 79; then XID 94"))
    (changed,) = told.rounds()
    assert changed["message"].endswith(f"21 Sep; then XID 94 {link}")
    ended = said.replace("since 14:13", "from 14:13 to 14:13")
    for cause, how in (("20261123T01-2", "explained"), (None, "over")):
        told.find(fault(end_time=NOW + 7, explained_by=cause))
        (over,) = told.rounds()
        assert over["message"] == f"{how}: {ended}"
    assert over["metadata"]["uid"] == event["metadata"]["uid"]


@pytest.mark.parametrize("rank", [1, None])
def test_an_anomaly_of_a_rank_is_on_its_pod(told, rank):
    in_pods(told)
    told.find(straggler(rank=rank), node=1)
    (event,) = told.rounds()
    about = {"kind": "Pod", "namespace": "team", "name": "llama-1", "uid": "0a1b-1"}
    assert event["involvedObject"] == about | {"apiVersion": "v1"}
    assert event["metadata"]["namespace"] == "team"


@pytest.mark.parametrize("wrong", ["ns/a/../b", "uid/1000", "ns/Team", "ns/"])
def test_of_an_owner_that_is_no_namespace_nothing_is_told(told, wrong):
    told.nodes[0].say(seen(0, world=2, owner=wrong, pod="llama-0", pod_uid="0a1b"))
    told.find(straggler(rank=0, owner=wrong))
    assert told.rounds() == []


def test_one_agents_flood_delays_no_other_agent(told):
    told.find(*(fault(number) for number in range(50)))
    told.find(fault(99), node=1)
    assert told.nodes[1].name in {one["involvedObject"]["name"] for one in told.rounds()}
    no_api: Any = None
    events = EventPublisher(no_api, told.cluster.cluster, LINK)
    events._served = {"a": 2.0, "b": 1.0}
    assert events._in_turn(["1", "2"], {"1": "a", "2": "b"}) == ["2", "1"]


def test_a_flood_is_told_a_few_at_a_time_and_a_long_text_is_cut(told):
    told.find(*(fault(number, summary="x" * 3000) for number in range(15)))
    assert len(told.rounds()) == 10
    events = told.rounds(2)
    assert len(events) == 15
    assert max(len(one["message"]) for one in events) < 400


def test_what_a_server_does_not_take_is_counted_by_what_it_is_said_once_and_tried_again(
    stand_in, caplog
):
    told, metrics = Told(stand_in), AgentMetrics()
    told.find(fault())
    told.cluster.hear()
    told.cluster.cluster.nodes[told.nodes[0].address].up = False
    kinds = ("events", "conditions", "taints")
    own: dict[str, Any] = {**dict.fromkeys(kinds, True), "service_account": stand_in.folder}
    config = FleetConfig(kubernetes=KubernetesConfig(**own))
    slept: list[float] = []
    alone: set[str] = set()

    def counted() -> list[float]:
        name = "warpwatch_fleet_kubernetes_errors_total"
        values = (metrics.registry.get_sample_value(name, {"what": what}) for what in kinds)
        return [-1.0 if value is None else value for value in values]

    async def run() -> None:
        over = asyncio.Event()

        async def sleep(seconds: float) -> None:
            slept.append(seconds)
            if min(counted()) >= 2:
                over.set()
            await asyncio.sleep(0)

        async def at_once(work: Any) -> None:
            if not alone:
                alone.add(work.__qualname__)
                raise ZeroDivisionError("a bug ends no work")
            await work(0)

        no_captures: Any = None
        source: Any = SimpleNamespace(alone=at_once)
        fleet = Kubernetes(config, told.cluster.cluster, no_captures, metrics, source, sleep)
        assert counted() == [0.0, 0.0, 0.0]
        stand_in.failing = 503
        running = asyncio.create_task(fleet.run())
        running.add_done_callback(lambda _: over.set())
        await over.wait()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(run())
    assert set(slept) == {5.0}
    # Workers of one fleet share `max_tainted`.
    assert alone == {"Taints.advance"}
    assert min(counted()) >= 2
    assert [one.levelname for one in caplog.records if "503:" in one.message] == ["WARNING"] * 3
    assert caplog.text.count("ZeroDivisionError: a bug ends no work") == 1


def test_what_lasts_is_told_again_before_the_server_forgets_it(told):
    told.find(fault(time=NOW))
    (event,) = told.rounds(after_s=3599)
    assert (event["count"], event["lastTimestamp"]) == (2, timestamp(NOW + 1800))
    (event,) = told.rounds(after_s=1)
    assert (event["count"], event["lastTimestamp"]) == (3, timestamp(NOW + 3600))
    assert event["firstTimestamp"] == timestamp(NOW)


def test_what_was_over_long_before_the_fleet_began_is_not_told(told):
    told.find(fault(1, end_time=NOW - 601), fault(2, end_time=NOW - 599))
    (event,) = told.rounds()
    assert "20261123t01-2" in event["metadata"]["name"]


def test_an_event_that_the_server_has_forgotten_is_made_anew(told):
    told.find(fault())

    def forget() -> None:
        told.server.ask("DELETE", "/api/v1/namespaces/default/events")
        told.find(fault(summary="XID 94"))
        told.cluster.hear()

    told.rounds(2, forget)
    (event,) = told.rounds()
    assert event["message"].startswith("XID 94")


def test_a_namespace_that_is_gone_holds_up_no_other_event(told):
    told.nodes[0].say(seen(0, world=2, owner="ns/gone", pod="llama-0", pod_uid="0a1b"))
    told.find(straggler(rank=0, owner="ns/gone"), fault(2))
    with pytest.raises(KubernetesError, match="404: "):
        told.rounds()
    assert "Xid" in told.reasons()


def test_a_request_that_is_cancelled_at_any_time_leaves_no_socket(stand_in):
    async def cancelled(after: int) -> None:
        api = KubernetesClient(stand_in.folder)
        asked = asyncio.create_task(api.ask("GET", "/api/v1/nodes/gpu-1"))
        for _ in range(after):
            await asyncio.sleep(0)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        await api.close()

    for after in range(60):
        asyncio.run(cancelled(after))
    # An open socket warns when it is collected, which fails the test.
    gc.collect()
