"""Captures over nodes: real capture services over HTTP, ranks that the test plays."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from tests.cases import cases
from tests.daemon.captures.capture_node import MANUAL, TRAIN
from tests.fleet.capturing import PlayedFleet
from tests.fleet.nodes import TestCluster, TestNode, seen
from tests.golden_lines import line
from tests.manual_clock import ManualClock
from warpwatch import protocol
from warpwatch_capturing import store
from warpwatch_capturing.config import StoreConfig, TriggersConfig
from warpwatch_capturing.register import CaptureRegister
from warpwatch_capturing.regular import RegularCaptures
from warpwatch_capturing.store import Store
from warpwatch_detection.anomalies.register import Change
from warpwatch_fleet.agent_link import AgentError, AgentLink
from warpwatch_fleet.captures import remote_agents
from warpwatch_fleet.captures.remote_agents import RemoteAgent, RemoteAgents
from warpwatch_fleet.captures.requests import FleetBoard, FleetCaptures, FleetMetrics, Schedule
from warpwatch_fleet.config import ScheduleConfig
from warpwatch_fleet.targets import Target
from warpwatch_telemetry.anomalies import Anomaly
from warpwatch_telemetry.captures import (
    CAPTURED,
    NO_RECIPE,
    AnomalySeen,
    Capture,
    CaptureRequest,
    RankCapture,
)
from warpwatch_telemetry.errors import Refused
from warpwatch_telemetry.jobs import JobId
from warpwatch_telemetry.records import RankSeen

ANOMALY = Anomaly(
    1000.0, "warning", "rank 0 computes longer", rank=0, id="f1-1", kind="straggler",
    begin_step=40, value=0.8, baseline=0.5,
    judged_by="fleet", **TRAIN.fields(),
)  # fmt: skip
SCHEDULE = ScheduleConfig(job="tr*", every=3600, steps=2, ranks=3)


def by_hand(captures: FleetCaptures) -> Any:
    return captures.start(MANUAL)


def only(captures: FleetCaptures) -> Capture:
    (capture,) = captures.shown()
    return capture


def states(capture: Capture) -> list[str]:
    return [f"{rank.rank} {rank.state} {rank.node}" for rank in capture.ranks]


WRITTEN = ["0 written gpu-1", "1 written gpu-1", "2 written gpu-2", "3 written gpu-2"]


def test_all_ranks_of_all_nodes_begin_with_one_step_under_one_id(fleet):
    fleet.agents[1].node.rings[0].word(protocol.WORD_STEP_BEGUN, 301)
    capture = only(fleet.run(by_hand))
    assert (capture.outcome, capture.detail, capture.steps) == ("complete", "", 3)
    # 2 s of steps of 0.1 s ahead of the fastest rank of all nodes.
    assert capture.start_step == 300 + 20
    assert states(capture) == WRITTEN
    for agent in fleet.agents:
        (own,) = agent.captures()
        assert (own.id, own.start_step) == (capture.id, 320)


class PlayedLink(AgentLink):
    """All agents, with one reply to everything."""

    holder = "fleet-0"
    reply: Any = None
    of = ""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.clock, self.parts = ManualClock(0.0), [(7, 0.0)]

    def link(self, target: Target) -> PlayedLink:
        self.of = f"{target.address}: "
        return self

    async def request(self, path: str, body: Mapping[str, Any]) -> Any:
        self.asked.append(f"{self.of}{path} {dict(body)}")
        if isinstance(self.reply, Exception):
            raise self.reply
        return self.reply

    def download(self, path: str) -> Iterator[bytes]:
        self.asked.append(f"{self.of}{path}")
        if isinstance(self.reply, Exception) and (self.of or "000009" in path):
            raise self.reply
        for size, after_s in self.parts:
            yield b"x" * size
            self.clock.advance(after_s)
        yield b""


REPLIES = {
    "refused": Refused("refused_busy", "busy"),
    "away": AgentError("away"),
    "bug": ZeroDivisionError(1),
}
WHOLE = replace(
    MANUAL, trigger="schedule", options=("stacks",), reason="r" * 501, anomaly_id="a1",
    anomaly_kind="straggler", anomaly_seen=AnomalySeen(0, 40, 1.6), alerts=("f1",),
)  # fmt: skip


@pytest.mark.parametrize("name", PARTS := cases(__file__)["parts"])
def test_what_is_asked_of_an_agent_and_what_becomes_of_its_part_is_golden(
    name, tmp_path, golden_case
):
    cluster, link = TestCluster(TestNode("gpu-1")), PlayedLink()
    cluster.hear()
    (node,) = cluster.cluster.nodes.values()
    agents = RemoteAgents(cluster.cluster, lambda _: link, asyncio.run, link.clock.monotonic)
    agent = RemoteAgent(agents, node, TRAIN, (0, 1))
    capture = Capture("20261122T201500-000000", WHOLE, 1000.0, steps=4)

    def report(attempt: str, about: dict[str, Any]) -> None:
        ranks = [
            one | {"detail": one.get("detail", "").replace("D300", "d" * 300)}
            for one in about.pop("ranks")
        ]
        parts = tuple(msgspec.convert(one, RankCapture) for one in ranks)
        ident = f"{capture.id}{attempt}"
        node.captures[ident] = replace(capture, id=ident, ranks=parts, **about)

    def arm(attempt: int, at: int | None, kind: Any = "torch") -> None:
        request = replace(WHOLE, kind=kind)
        agent.arm(replace(capture, request=request, start_step=at), attempt, 0.0)

    def shortcomings(*why: str) -> list[str]:
        ranks = [store.unread(one, *why) if why else one for one in agent.ranks.values()]
        return list(agent.shortcomings(ranks))

    calls: dict[str, Any] = {
        "replies": lambda reply: setattr(link, "reply", REPLIES.get(str(reply), reply)),
        "prepare": lambda: agent.prepare(WHOLE, 0.0),
        "arm": arm,
        "reports": report,
        "up": lambda up: setattr(node, "up", up),
        "forgets": node.captures.clear,
        "sends": lambda *parts: setattr(link, "parts", parts),
        "removed": lambda: cluster.cluster.set_targets({}),
        "collect": lambda rank: agent.collect(rank, tmp_path)[1:],
        "shortcomings": shortcomings,
    }
    node.up, node.reason = True, "ConnectError"
    for what, *arguments in PARTS[name]:
        call: Any = calls.get(what) or getattr(agent, what)
        result = call(*arguments)
        link.asked.append(f"{what}: {result}, over: {agent.is_over} {agent.lost}, {agent.answer!r}")
        link.asked += [line("   ", rank).rstrip() for rank in agent.ranks.values()]
    text = "\n".join((*link.asked, "")).replace("d" * 300, "D300")
    golden_case(text.replace("r" * 500, "R500"), name)


def kept_capture(about: dict[str, Any]) -> Capture:
    names = {one: about.pop(one, getattr(TRAIN, one)) for one in ("owner", "run")}
    names["anomaly_id"] = about.pop("anomaly_id", None)
    request = replace(MANUAL, job=about.pop("job", "train"), **names)
    ranks = tuple(msgspec.convert(one, RankCapture) for one in about.pop("ranks"))
    return Capture(request=request, ranks=ranks, files=tuple(about.pop("files", ())), **about)


class Kept:
    """A fleet with captures of its own and of three agents, one of them a tenant's."""

    def __init__(self, folder: Path, kept: dict[str, Any]) -> None:
        self.link = PlayedLink()
        board, clock = FleetBoard(FleetMetrics()), ManualClock(wall=1000.0)
        register = CaptureRegister(Store(StoreConfig(url=folder.as_uri())), board)
        for one in kept.pop("own"):
            register.keep(kept_capture(one))
        self.cluster = TestCluster().cluster
        labels = {one: {"owner": "ns/tenant"} if one[0] == "1" else {} for one in kept}
        self.cluster.set_targets({one: Target(one, about) for one, about in labels.items()})
        for address, node in self.cluster.nodes.items():
            node.up, node.reason, node.name = True, "ConnectError", address
            for one in kept[address]:
                node.keep_capture(kept_capture(one))
        for rank in range(4):
            ours = RankSeen(1000.0, rank=rank, world_size=4, **TRAIN.fields())
            self.cluster._join(f"gpu-{1 + rank // 2}", ours)
        self.cluster._join("gpu-2", seen(0, 1, "single"))
        self.captures = FleetCaptures(
            self.cluster, cast(Any, self.link), TriggersConfig(), register, board, lambda: None,
            clock.monotonic, clock.wall,
        )  # fmt: skip
        self.passes = clock.advance

    def start(self, about: dict[str, Any]) -> Any:
        request = msgspec.convert(asdict(MANUAL) | about, CaptureRequest)
        return asyncio.run(self.captures.start(request))

    def download(self, *about: Any) -> Any:
        found = self.captures.download(*about)
        return found and b"".join(found)

    def replies(self, reply: Any) -> None:
        self.link.reply = REPLIES.get(str(reply), reply)

    def name(self, are_shared: bool, anomaly_id: str | None) -> str:
        self.captures.are_shared = are_shared
        return self.captures._name_of(replace(MANUAL, anomaly_id=anomaly_id))

    def away(self) -> None:
        self.cluster.nodes["gpu-2"].up = False

    def removed(self) -> None:
        self.cluster.set_targets({})

    def is_busy(self, owner: str, job: str) -> bool:
        return self.captures.is_busy(JobId(owner, job, TRAIN.run))

    def uploads(self) -> None:
        for one in list(self.cluster.nodes["gpu-2"].captures.values()):
            self.cluster.nodes["gpu-2"].keep_capture(replace(one, remote="s3://2"))


def test_the_captures_of_a_fleet_and_of_its_nodes_are_golden(tmp_path, golden_case):
    table = cases(__file__)
    kept = Kept(tmp_path, table["kept"])
    lines = [line("shown", one) for one in kept.captures.shown()]
    for what, *arguments in table["asked"]:
        try:
            call: Any = getattr(kept, what, None) or getattr(kept.captures, what)
            found = call(*arguments)
        except Refused as refused:
            found = f"{refused.reason}: {refused}"
        lines += [*(f"{one}\n" for one in kept.link.asked), f"{what} {arguments}: {found}\n"]
        kept.link.asked.clear()
    golden_case("".join(lines))


def test_a_rank_that_is_late_ends_the_try_on_all_nodes_and_a_later_step_is_named(fleet):
    def answers(rank: int, name: str) -> str:
        return "late" if rank == 3 and name.count("-") == 2 else "armed"

    capture = only(fleet.run(by_hand, answers, records=lambda name: name.count("-") == 3))
    assert capture.outcome == "complete"
    for agent in fleet.agents:
        first, second = agent.captures()
        assert (first.id, first.outcome) == (capture.id, "failed")
        assert (second.id, second.outcome) == (f"{capture.id}-2", "complete")
        assert second.start_step == capture.start_step
        # Twice as much time as at the first try: 4 s.
        assert (first.start_step, second.start_step) == (21, 41)
    assert "cancelled by the fleet" in fleet.agents[0].captures()[0].detail


def test_what_one_agent_refuses_is_begun_on_none(fleet):
    fleet.agents[1].node.service.request(MANUAL)
    captures = fleet.run(by_hand, lambda *_: None)
    capture = next(one for one in captures.shown() if one.outcome == "refused_busy")
    assert capture.detail == "gpu-2: rank 2, 3 of train is being captured"
    assert fleet.agents[0].captures() == []


def test_a_node_that_is_away_is_left_out_and_one_that_dies_is_named(fleet, monkeypatch):
    away = fleet.agents[1]
    away.is_heard = False
    fleet.hear()
    capture = only(fleet.run(by_hand))
    said = "gpu-2: cannot be followed: ConnectError"
    assert (capture.outcome, capture.detail, away.captures()) == ("partial", said, [])
    away.is_heard = True
    fleet.hear()
    silent: list[float] = []

    def die() -> None:
        if "armed" in {rank.state for one in away.captures()[-1:] for rank in one.ranks}:
            away.is_heard = False
            silent.append(fleet.clock.monotonic())

    monkeypatch.setattr(remote_agents, "LOST_S", 3.0)
    capture = fleet.run(by_hand, meanwhile=die).shown()[-1]
    assert capture.detail == said
    assert states(capture) == [*WRITTEN[:2], "2 missing gpu-2", "3 missing gpu-2"]
    assert fleet.clock.monotonic() - silent[0] == pytest.approx(3.0, abs=0.25)


def test_a_fleet_counts_only_its_captures_that_a_restart_interrupted(fleet, tmp_path, stack):
    done = only(fleet.run(by_hand))
    running = replace(done, id=f"{done.id}-2", outcome=None, end_time=None)
    fleet.store.create(fleet.register.with_folder(running))
    registry = PlayedFleet(tmp_path, stack, fleet.agents).board.metrics.registry
    samples = [one for family in registry.collect() for one in family.samples]
    counted = [(one.labels["outcome"], one.value) for one in samples if "outcome" in one.labels]
    assert counted == [("failed", 1.0)]


def for_anomaly(fleet: PlayedFleet, anomaly: Anomaly, **options: Any) -> Sequence[Capture]:
    return fleet.run(lambda _: None, changes=[Change("opened", anomaly)], **options).captures()


def test_an_anomaly_of_the_fleet_is_captured_once_under_the_policies_of_the_agents(fleet):
    (capture,) = for_anomaly(fleet, ANOMALY)
    assert capture.outcome == "complete"
    (decision,) = fleet.board.decisions
    assert (decision.outcome, decision.capture_id) == (CAPTURED, capture.id)
    assert [agent.captures()[0].request.anomaly_id for agent in fleet.agents] == ["f1-1", "f1-1"]
    # The diagnoses of the fleet and of the agents hear what it saw.
    assert (capture.diagnosis or {})["findings"][0]["evidence"][-1] == (
        "the anomaly that requested the capture shows it, too: straggler of rank 0 since step 40, "
        "1.60 times as long as usual"
    )
    seen = [agent.captures()[0].request.anomaly_seen for agent in fleet.agents]
    assert seen == [AnomalySeen(0, 40, 0.8 / 0.5)] * 2
    gone = replace(ANOMALY, id="3", kind="oom", job="", owner="", run="")
    for_anomaly(fleet, gone)
    decision = fleet.board.decisions[-1]
    assert (decision.outcome, decision.anomaly_id) == (NO_RECIPE, "3")


def taken(fleet: PlayedFleet, after_s: float, times: int = 1, **options: Any) -> list[Capture]:
    fleet.advance(after_s)

    async def poll(captures: FleetCaptures) -> None:
        regular = RegularCaptures(Schedule((SCHEDULE,), fleet.cluster), captures)
        for _ in range(times):
            active = [one for one in fleet.cluster.anomalies() if one.end_time is None]
            await asyncio.to_thread(regular.advance, fleet.clock.wall(), active)
            await captures.idle()
            fleet.advance(1.5)

    return list(fleet.run(poll, **options).shown())


def test_a_healthy_job_is_captured_when_it_is_due_and_not_again_after_a_restart(fleet, monkeypatch):
    assert taken(fleet, 3599.0) == []
    (capture,) = taken(fleet, 1.0, times=2)
    assert (capture.outcome, capture.request.trigger) == ("complete", "schedule")
    assert [rank.rank for rank in capture.ranks] == [0, 1, 2]
    schedule = Schedule((SCHEDULE,), fleet.cluster)
    (job,) = schedule.jobs(capture.time)
    assert schedule.due(job, [capture], capture.time) is None
    # Nodes forget it before the next one is due.
    due = [schedule.due(job, [], capture.time + after_s) for after_s in (3599.0, 3600.0)]
    assert [one is not None for one in due] == [False, True]
    for agent in fleet.agents:
        (own,) = agent.captures()
        assert (own.request.trigger, own.request.steps) == ("schedule", 2)
        assert agent.node.counted("complete", "schedule") == 1
    # Another fleet knows it from the agents.
    assert [one.id for one in taken(fleet, 3590.0)] == [capture.id]
    sick = Anomaly(
        time=1.0, severity="warning", summary="", rank=3, **TRAIN.fields(), id="1", kind="gc_pause"
    )  # fmt: skip
    fleet.agents[1].stream.put_anomaly(sick)
    fleet.agents[1].stream.put_anomaly(replace(sick, id="2", rank=1, end_time=2.0))
    fleet.hear()
    assert [one.id for one in taken(fleet, 3600.0)] == [capture.id]
    # By hand it is captured with the rank that the anomaly names.
    monkeypatch.setattr(remote_agents, "MAX_RANKS", 3)
    monkeypatch.setattr(remote_agents, "PEERS", 1)
    unused: Any = None
    agents = RemoteAgents(fleet.cluster, unused, unused)
    (live,) = agents.jobs()
    assert agents.choose(live, MANUAL) == (0, 3)


def test_a_restart_does_not_repeat_a_failed_capture_of_a_schedule_early(fleet):
    for after_s, count in ((3600, 1), (590, 1), (20, 2)):
        outcomes = [one.outcome for one in taken(fleet, after_s, records=lambda _: "no_space")]
        assert outcomes == ["failed"] * count
