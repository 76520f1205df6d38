"""Which run of which job a ring is of, and by what name it is shown."""

from __future__ import annotations

import hashlib
import os
from datetime import UTC, datetime

import pytest

from tests.daemon.ranks.sources import RankNode
from warpwatch_telemetry.jobs import JobId
from warpwatch_telemetry.state import RankState

OWN = f"uid/{os.getuid()}"


def look(node: RankNode) -> dict[JobId, list[RankState]]:
    """The ranks of each job after another poll."""
    node.poll()
    jobs: dict[JobId, list[RankState]] = {}
    for rank in node.states():
        jobs.setdefault(rank.job_id, []).append(rank)
    return jobs


def shown(run: str) -> str:
    return f"train#{hashlib.sha256(run.encode()).hexdigest()[:6]}"


def test_a_run_that_is_named_has_that_name_on_every_node_and_in_records(node):
    for rank in (0, 1):
        ring = node.ring(rank=rank, run="slurm-77")
        ring.step()
        ring.event("oom")
    said = {(one.owner, one.job, one.run) for one in node.poll()}
    assert said == {(OWN, "train", "slurm-77")}
    assert list(look(node)) == [JobId(OWN, "train", "slurm-77")]


@pytest.mark.parametrize(("later_s", "runs"), [(599.0, 1), (601.0, 2)])
def test_ranks_that_name_no_run_are_of_the_one_that_began_up_to_ten_minutes_before(
    node, later_s, runs
):
    first = node.ring(rank=0)
    node.clock.advance(later_s)
    node.ring(rank=1)
    found = look(node)
    assert [len(ranks) for ranks in found.values()] == [2 // runs] * runs
    job, _ = next(iter(found.items()))
    began = datetime.fromtimestamp(node.began, UTC).strftime("%Y%m%dT%H%M%S")
    assert (job.owner, job.name, job.run) == (OWN, "train", f"{began}-{first.path.stem[-6:]}")


@pytest.mark.parametrize(
    "other",
    [
        pytest.param({"rank": 0}, id="the same rank"),
        pytest.param({"rank": 1, "world_size": 4}, id="another world size"),
        pytest.param({"rank": 1, "master": "10.0.0.9:29500"}, id="another master"),
        pytest.param({"rank": 1, "run": "r2"}, id="a run that is named"),
    ],
)
def test_what_cannot_be_of_the_same_run_is_another_one_of_its_own_name(node, other):
    node.ring(rank=0)
    node.clock.advance(0.1)
    node.ring(**other)
    one, two = look(node)
    assert (one.name, two.name) == ("train", shown(two.run))
    assert one.run != two.run


def test_a_second_process_of_the_same_rank_and_run_is_left_out_and_counted(node):
    for _ in range(2):
        node.ring(run="r1").step()
    ((job, (rank,)),) = look(node).items()
    assert (job.name, rank.steps_total) == ("train", 1)
    assert node.rejects == {"duplicate_rank": 1}


def test_programs_without_peers_under_one_id_are_runs_of_their_own(node):
    """As one Slurm allocation has them."""
    for _ in range(3):
        node.ring(world_size=1, run="77")
    jobs = look(node)
    assert len({job.name for job in jobs}) == len({job.run for job in jobs}) == 3
    assert all(job.run.startswith("77") for job in jobs)
    assert node.rejects == {}


def test_no_two_live_jobs_of_an_owner_are_shown_by_one_name(node):
    node.ring()
    node.ring(run="r2")
    third = node.file(job=shown("r2"), run="r3")
    # A ring's name has no such letter, what it says may.
    third.path = third.path.rename(third.path.with_name(third.path.name.replace("#", "-")))
    node.hold(third)
    assert len({job.name for job in look(node)}) == 3


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_job_of_another_owner_with_the_same_name_and_run_is_another_job(node):
    node.ring(run="r1")
    os.chown(node.ring(rank=1, run="r1").path, 1234, 1234)
    assert sorted(look(node)) == [JobId("uid/0", "train", "r1"), JobId("uid/1234", "train", "r1")]


def test_a_run_whose_ranks_ended_in_order_is_over_and_the_next_one_counts_from_0(node):
    first = node.ring()
    first.step()
    node.poll()
    first.end()
    (before,) = look(node)
    node.ring().step()
    ((after, (rank,)),) = look(node).items()
    assert (after.name, rank.steps_total, rank.status) == ("train", 1, "running")
    assert after.run != before.run


def test_a_run_keeps_its_name_over_a_restart_of_the_daemon(node):
    first, _ = node.ring(), node.ring()
    before = look(node)
    first.die()
    node.restart()
    assert sorted(look(node)) == sorted(before)
