"""Which run of which job a ring is of, and by what name it is shown."""

from __future__ import annotations

import hashlib
import os
import time
from collections import Counter

import pytest

from tests.daemon.ranks.ring_files import RingFile
from tests.daemon.ranks.sources import ranks_source
from warpwatch import protocol
from warpwatch_daemon.ranks.folder import RendezvousFolder
from warpwatch_daemon.ranks.source import RanksSource
from warpwatch_telemetry.jobs import JobId
from warpwatch_telemetry.records import Step
from warpwatch_telemetry.state import RankState

OWN = f"uid/{os.getuid()}"


def look(source: RanksSource) -> dict[JobId, list[RankState]]:
    """The ranks of each job after another poll."""
    source.poll(time.time(), time.monotonic())
    jobs: dict[JobId, list[RankState]] = {}
    for rank in source.states(time.monotonic()):
        jobs.setdefault(rank.job_id, []).append(rank)
    return jobs


def shown(run: str) -> str:
    return f"train#{hashlib.sha256(run.encode()).hexdigest()[:6]}"


def test_a_run_that_is_named_has_that_name_on_every_node(
    folder: RendezvousFolder, source: RanksSource
) -> None:
    rings = [RingFile(folder.ranks, rank=rank, run="slurm-77") for rank in (0, 1)]
    with rings[0].held(), rings[1].held():
        assert list(look(source)) == [JobId(OWN, "train", "slurm-77")]


def test_ranks_that_name_no_run_are_of_the_one_that_just_began(
    folder: RendezvousFolder, source: RanksSource
) -> None:
    rings = [RingFile(folder.ranks, rank=rank) for rank in (0, 1)]
    with rings[0].held(), rings[1].held():
        ((job, ranks),) = look(source).items()
        assert [rank.rank for rank in ranks] == [0, 1]
        started = time.strftime("%Y%m%dT", time.gmtime())
        assert (job.owner, job.name, job.run[:9]) == (OWN, "train", started)


@pytest.mark.parametrize(
    "other",
    [
        pytest.param({"rank": 0}, id="the same rank"),
        pytest.param({"rank": 1, "world_size": 4}, id="another world size"),
        pytest.param({"rank": 1, "master": "10.0.0.9:29500"}, id="another master"),
        pytest.param({"rank": 1, "run": "r2"}, id="a run that is named"),
    ],
)
def test_what_cannot_be_of_the_same_run_is_another_one_of_its_own_name(
    folder: RendezvousFolder, source: RanksSource, other: dict[str, object]
) -> None:
    first, second = RingFile(folder.ranks, rank=0), RingFile(folder.ranks, **other)
    with first.held(), second.held():
        one, two = look(source)
        assert (one.name, two.name) == ("train", shown(two.run))
        assert one.run != two.run


def test_a_second_process_of_the_same_rank_and_run_is_left_out_and_counted(
    folder: RendezvousFolder,
) -> None:
    rejects: Counter[str] = Counter()
    source = ranks_source(folder, lambda reason: rejects.update([reason]))
    first = RingFile(folder.ranks, run="r1")
    second = RingFile(folder.ranks, run="r1")
    with first.held(), second.held():
        first.step()
        second.step()
        ((job, (rank,)),) = look(source).items()
        assert (job.name, rank.steps_total) == ("train", 1)
        assert rejects == {"duplicate_rank": 1}


def test_programs_without_peers_under_one_id_are_runs_of_their_own(
    folder: RendezvousFolder,
) -> None:
    """As one Slurm allocation has them."""
    rejects: Counter[str] = Counter()
    source = ranks_source(folder, lambda reason: rejects.update([reason]))
    rings = [RingFile(folder.ranks, world_size=1, run="77") for _ in range(3)]
    with rings[0].held(), rings[1].held(), rings[2].held():
        jobs = look(source)
        assert len({job.name for job in jobs}) == len({job.run for job in jobs}) == 3
        assert all(job.run.startswith("77") for job in jobs)
    assert rejects == {}


def test_no_two_live_jobs_of_an_owner_are_shown_by_one_name(
    folder: RendezvousFolder, source: RanksSource
) -> None:
    first, second = RingFile(folder.ranks), RingFile(folder.ranks, run="r2")
    third = RingFile(folder.ranks, job=shown("r2"), run="r3")
    # A ring's name has no such letter, what it says may.
    third.path = third.path.rename(folder.ranks / third.path.name.replace("#", "-"))
    with first.held(), second.held(), third.held():
        assert len({job.name for job in look(source)}) == 3


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_job_of_another_owner_with_the_same_name_and_run_is_another_job(
    folder: RendezvousFolder, source: RanksSource
) -> None:
    mine, theirs = RingFile(folder.ranks, run="r1"), RingFile(folder.ranks, rank=1, run="r1")
    os.chown(theirs.path, 1234, 1234)
    with mine.held(), theirs.held():
        assert sorted(look(source)) == [
            JobId("uid/0", "train", "r1"),
            JobId("uid/1234", "train", "r1"),
        ]


def test_a_rank_beyond_its_world_is_refused(folder: RendezvousFolder) -> None:
    rejects: Counter[str] = Counter()
    source = ranks_source(folder, lambda reason: rejects.update([reason]))
    with RingFile(folder.ranks, rank=777, world_size=8).held():
        assert look(source) == {}
    assert rejects == {"bad_metadata": 1}


def test_a_run_whose_ranks_ended_in_order_is_over_and_the_next_one_counts_from_0(
    folder: RendezvousFolder, source: RanksSource
) -> None:
    first = RingFile(folder.ranks)
    with first.held():
        first.step()
        look(source)
        first.word(protocol.WORD_ENDED, 1)
    (before,) = look(source)
    second = RingFile(folder.ranks)
    with second.held():
        second.step()
        ((after, (rank,)),) = look(source).items()
        assert (after.name, rank.steps_total, rank.status) == ("train", 1, "running")
        assert after.run != before.run


def test_records_say_of_which_run_they_are(folder: RendezvousFolder, source: RanksSource) -> None:
    ring = RingFile(folder.ranks, run="r1")
    with ring.held():
        ring.step()
        ring.event("oom")
        records = source.poll(time.time(), time.monotonic())
    steps = [record for record in records if isinstance(record, Step)]
    assert [(step.owner, step.job, step.run) for step in steps] == [(OWN, "train", "r1")]
    assert {getattr(record, "run", None) for record in records} == {"r1"}


def test_a_run_keeps_its_name_over_a_restart_of_the_daemon(
    folder: RendezvousFolder, source: RanksSource
) -> None:
    first, second = RingFile(folder.ranks), RingFile(folder.ranks)
    with second.held():
        with first.held():
            before = look(source)
        source.close()
        after = look(ranks_source(folder))
        assert sorted(after) == sorted(before)
