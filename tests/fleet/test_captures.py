"""Captures over nodes: real coordinators over HTTP, ranks that the test plays."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.daemon.captures.capture_node import MANUAL, TRAIN
from tests.fleet.capturing import PlayedAgent, PlayedFleet
from warpwatch import protocol
from warpwatch_daemon.captures import capture_id as ids
from warpwatch_fleet.captures import over_nodes
from warpwatch_fleet.captures.choosing import MAX_RANKS, choose
from warpwatch_fleet.captures.requests import Captures
from warpwatch_telemetry.anomalies import Anomaly
from warpwatch_telemetry.captures import CAPTURED, AnomalySeen, Capture, RankCapture
from warpwatch_telemetry.errors import Refused

ANOMALY = Anomaly(
    1000.0, "warning", "rank 0 computes longer", rank=0, id="f1-1", kind="straggler",
    begin_step=40, value=0.8, baseline=0.5,
    judged_by="fleet", **TRAIN.fields(),
)  # fmt: skip


@pytest.fixture
def fleet(tmp_path: Path, stack: ExitStack, agents: list[PlayedAgent]) -> PlayedFleet:
    return PlayedFleet(tmp_path, stack, *agents)


def only(captures: Captures) -> Capture:
    (capture,) = captures.shown()
    return capture


def states(capture: Capture) -> list[tuple[int, str, str | None]]:
    return [(rank.rank, rank.state, rank.node) for rank in capture.ranks]


def test_all_ranks_of_all_nodes_begin_with_one_step_under_one_id(
    fleet: PlayedFleet, agents: list[PlayedAgent]
) -> None:
    agents[1].node.rings[0].word(protocol.WORD_STEP_BEGUN, 301)
    capture = only(fleet.run(lambda captures: captures.request(MANUAL)))
    assert (capture.outcome, capture.detail, capture.steps) == ("complete", "", 3)
    # 2 s of steps of 0.1 s ahead of the fastest rank of all nodes, and what the asking took.
    assert capture.start_step is not None
    assert capture.start_step > 300 + 20
    assert states(capture) == [
        (0, "written", "gpu-1"),
        (1, "written", "gpu-1"),
        (2, "written", "gpu-2"),
        (3, "written", "gpu-2"),
    ]
    for agent in agents:
        (own,) = agent.captures()
        assert (own.id, own.start_step) == (capture.id, capture.start_step)


def test_a_rank_that_is_late_ends_the_try_on_all_nodes_and_a_later_step_is_named(
    fleet: PlayedFleet, agents: list[PlayedAgent]
) -> None:
    capture = only(
        fleet.run(
            lambda captures: captures.request(MANUAL),
            lambda rank, name: "late" if rank == 3 and name.count("-") == 2 else "armed",
            records=lambda name: name.count("-") == 3,
        )
    )
    assert capture.outcome == "complete"
    for agent in agents:
        first, second = agent.captures()
        assert (first.id, first.outcome) == (capture.id, "failed")
        assert (second.id, second.outcome) == (f"{capture.id}-2", "complete")
        assert first.start_step is not None
        assert second.start_step == capture.start_step
        assert (capture.start_step or 0) > first.start_step
    assert "cancelled by the fleet" in agents[0].captures()[0].detail


def test_a_rank_that_never_arms_is_missing_after_three_tries(
    fleet: PlayedFleet, agents: list[PlayedAgent], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(over_nodes, "MARGIN_S", 0.5)

    def give_up() -> None:
        if any(one.id.endswith("-3") for one in agents[1].captures()):
            agents[1].node.at += 10

    capture = only(
        fleet.run(
            lambda captures: captures.request(MANUAL),
            lambda rank, name: None if rank == 2 else "armed",
            give_up,
            lambda name: "-3-" in name,
        )
    )
    assert capture.outcome == "partial"
    assert capture.detail.startswith("gpu-2: ")
    assert [state for _, state, _ in states(capture)] == ["written"] * 2 + ["missing", "written"]


def test_what_one_agent_refuses_is_begun_on_none(
    fleet: PlayedFleet, agents: list[PlayedAgent]
) -> None:
    agents[1].node.coordinator.request(MANUAL)
    captures = fleet.run(lambda captures: captures.request(MANUAL), lambda *_: None)
    capture = next(one for one in captures.shown() if one.outcome == "refused_busy")
    assert capture.detail == "gpu-2: rank 2, 3 of train is being captured"
    assert agents[0].captures() == []


def test_a_node_that_is_away_is_left_out_and_one_that_dies_is_named(
    fleet: PlayedFleet, agents: list[PlayedAgent], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(over_nodes, "LOST_S", 0.3)
    agents[1].is_heard = False
    fleet.hear()
    capture = only(fleet.run(lambda captures: captures.request(MANUAL)))
    assert (capture.outcome, capture.detail) == (
        "partial",
        "gpu-2: cannot be followed: ConnectError",
    )
    assert agents[1].captures() == []
    agents[1].is_heard = True
    fleet.hear()

    def die() -> None:
        agents[1].is_heard = not any(rank.state == "armed" for rank in ranks_of(agents[1]))

    captures = fleet.run(lambda captures: captures.request(MANUAL), meanwhile=die)
    capture = captures.shown()[-1]
    assert capture.detail == "gpu-2: cannot be followed: ConnectError"
    assert [state for _, state, _ in states(capture)] == ["written"] * 2 + ["missing"] * 2


def ranks_of(agent: PlayedAgent) -> list[RankCapture]:
    return [rank for capture in agent.captures()[-1:] for rank in capture.ranks]


def test_of_two_fleets_the_second_is_refused(
    fleet: PlayedFleet, agents: list[PlayedAgent], tmp_path: Path, stack: ExitStack
) -> None:
    other = PlayedFleet(tmp_path, stack, *agents)
    refused: list[Capture] = []

    def ask(captures: Captures) -> Any:
        return captures.request(MANUAL)

    def ask_too() -> None:
        if not refused and agents[0].captures():
            with ThreadPoolExecutor() as elsewhere:
                asked = elsewhere.submit(other.run, ask, lambda *_: None)
                refused.extend(one for one in asked.result().shown() if one.outcome)

    capture = only(fleet.run(ask, lambda *_: "armed" if refused else None, ask_too))
    assert [one.outcome for one in refused] == ["refused_busy"]
    assert (capture.outcome, capture.detail) == ("complete", "")


def test_a_fleet_that_was_restarted_shows_what_nodes_say_of_one_capture_as_one(
    fleet: PlayedFleet, agents: list[PlayedAgent], tmp_path: Path, stack: ExitStack
) -> None:
    before = only(fleet.run(lambda captures: captures.request(MANUAL)))
    after = only(PlayedFleet(tmp_path, stack, *agents).run(lambda captures: None))
    assert (after.id, after.outcome, after.start_step) == (before.id, "complete", before.start_step)
    assert states(after) == states(before)


def test_ranks_of_one_node_are_its_agents_to_capture(
    fleet: PlayedFleet, agents: list[PlayedAgent]
) -> None:
    captures = fleet.run(lambda captures: captures.request(replace(MANUAL, ranks=(2,))))
    capture = only(captures)
    (own,) = agents[1].captures()
    assert (capture.id, states(capture)[0][::2]) == (own.id, (2, "gpu-2"))
    with pytest.raises(Refused, match=r"^gpu-2: rank 2 of train is being captured"):
        fleet.run(lambda captures: captures.request(replace(MANUAL, ranks=(2,))))


def test_what_alerts_ask_for_is_under_the_policies_of_the_agents(
    fleet: PlayedFleet, agents: list[PlayedAgent]
) -> None:
    asked = replace(MANUAL, ranks=(2,), trigger="alert", alerts=("f1@2026-11-21T20:00:00Z",))
    fleet.run(lambda captures: captures.request(asked))
    (own,) = agents[1].captures()
    assert (own.request.trigger, own.request.alerts) == ("alert", asked.alerts)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"job": "llama"}, "no running rank of job 'llama' is known; running jobs: train"),
        ({"ranks": (1, 7)}, "train has no running rank 7, only 0, 1, 2, 3"),
    ],
)
def test_what_does_not_run_is_refused_by_name(
    fleet: PlayedFleet, changes: dict[str, object], said: str
) -> None:
    asked = replace(MANUAL, **changes)  # type: ignore[arg-type]
    with pytest.raises(Refused, match=said):
        fleet.run(lambda captures: captures.request(asked))


def test_an_anomaly_of_the_fleet_is_captured_once_under_the_policies_of_the_agents(
    fleet: PlayedFleet, agents: list[PlayedAgent]
) -> None:
    captures = fleet.run(lambda captures: captures.trigger(ANOMALY))
    capture = only(captures)
    assert capture.outcome == "complete"
    assert [(one.outcome, one.capture_id) for one in captures.decisions()] == [
        (CAPTURED, capture.id)
    ]
    assert [agent.captures()[0].request.anomaly_id for agent in agents] == ["f1-1", "f1-1"]
    # The diagnoses of the fleet and of the agents hear what it saw.
    assert (capture.diagnosis or {})["findings"][0]["evidence"][-1] == (
        "the anomaly that asked saw it too: straggler of rank 0 since step 40, "
        "1.60 times as long as usual"
    )
    seen = [agent.captures()[0].request.anomaly_seen for agent in agents]
    assert seen == [AnomalySeen(0, 40, 0.8 / 0.5)] * 2
    captures = fleet.run(lambda captures: captures.trigger(replace(ANOMALY, id="f1-2")))
    (decision,) = captures.decisions()
    assert decision.outcome == "refused_cooldown"
    assert decision.detail.startswith(("gpu-1: ", "gpu-2: "))


@pytest.mark.parametrize("interruptions", [1, 2])
def test_a_capture_that_an_evaluation_interrupts_is_repeated_once(
    fleet: PlayedFleet, interruptions: int
) -> None:
    asked: list[str] = []

    def records(name: str) -> bool | str:
        if ids.base(name) not in asked:
            asked.append(ids.base(name))
        interrupted = asked.index(ids.base(name)) < interruptions
        return "interrupted: an evaluation began" if interrupted else True

    captures = fleet.run(lambda captures: captures.trigger(ANOMALY), records=records)
    outcomes = [capture.outcome for capture in captures.shown()]
    assert outcomes == ["failed", "complete" if interruptions == 1 else "failed"]
    (decision,) = captures.decisions()
    assert (decision.outcome, decision.capture_id) == (CAPTURED, captures.shown()[-1].id)


def test_of_a_large_job_who_is_named_and_three_peers_of_other_nodes_are_taken() -> None:
    nodes = {rank: f"gpu-{rank // 8}" for rank in range(64)}
    assert choose(nodes, [13]) == (0, 13, 16, 24)
    assert choose(nodes, []) == (0, 8, 16, 24, 32, 40, 48, 56)
    assert len(choose(nodes, range(64))) <= MAX_RANKS
    small = {rank: "gpu-1" for rank in range(MAX_RANKS)}
    assert choose(small, [3]) == tuple(range(MAX_RANKS))
