"""Profiles of healthy jobs, again and again: real coordinators, ranks that the test plays."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.daemon.captures.capture_node import TRAIN
from tests.fleet.capturing import PlayedAgent, PlayedFleet
from warpwatch_fleet.captures.choosing import spread
from warpwatch_fleet.captures.requests import Captures
from warpwatch_fleet.captures.schedules import Schedules
from warpwatch_fleet.config import ScheduleConfig
from warpwatch_telemetry.anomalies import Anomaly
from warpwatch_telemetry.captures import Capture

SCHEDULE = ScheduleConfig(job="tr*", every=3600, steps=2, ranks=3)


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[PlayedFleet]:
    with ExitStack() as stack:
        agents = [
            PlayedAgent(tmp_path, stack, f"gpu-{number + 1}", range(2 * number, 2 * number + 2))
            for number in range(2)
        ]
        yield PlayedFleet(tmp_path, stack, *agents)


def taken(fleet: PlayedFleet, times: int = 1) -> list[Capture]:
    """All captures, after schedules were looked at so often."""

    async def look(captures: Captures) -> None:
        schedules = Schedules((SCHEDULE,), fleet.cluster, captures)
        for _ in range(times):
            await schedules.advance()

    return list(fleet.run(look).shown())


def age(fleet: PlayedFleet, seconds: float) -> None:
    (job,) = fleet.cluster.jobs.values()
    job.begin_time -= seconds


def test_a_job_is_captured_when_it_is_due_and_not_again_after_a_restart(
    fleet: PlayedFleet,
) -> None:
    assert taken(fleet) == []
    age(fleet, 3600)
    (capture,) = taken(fleet, times=2)
    assert (capture.outcome, capture.request.trigger) == ("complete", "schedule")
    assert [rank.rank for rank in capture.ranks] == [0, 1, 2]
    for agent in fleet.agents:
        (own,) = agent.captures()
        assert (own.request.trigger, own.request.steps) == ("schedule", 2)
        assert agent.node.counted("complete", "schedule") == 1
    # Another fleet knows it from the agents.
    assert [one.id for one in taken(fleet)] == [capture.id]


def test_a_job_that_is_not_well_is_not_captured(fleet: PlayedFleet) -> None:
    age(fleet, 3600)
    sick = Anomaly(
        time=1.0, severity="warning", summary="", **TRAIN.fields(), id="1", kind="gc_pause"
    )  # fmt: skip
    fleet.agents[1].stream.put_anomaly(sick)
    fleet.hear()
    assert taken(fleet) == []


def test_ranks_are_taken_of_as_many_nodes_as_there_are() -> None:
    nodes = {0: "a", 1: "a", 2: "b", 3: "b", 4: "c"}
    assert spread(nodes, 4) == (0, 1, 2, 4)
    assert spread(nodes, 9) == (0, 1, 2, 3, 4)
