"""Which runs of several nodes are one job.

A run that has an id of its own is the same wherever owner, name and id are. One without joins
those of the same owner, name, world size and meeting point whose ranks are others, and which
began within ten minutes.
"""

from __future__ import annotations

from collections.abc import Iterable

from warpwatch_fleet.jobs import FleetJob
from warpwatch_telemetry.jobs import JobId
from warpwatch_telemetry.records import RankSeen

JOIN_S = 600.0


def find(seen: RankSeen, node: str, jobs: Iterable[FleetJob]) -> FleetJob | None:
    """The job that a rank of a node is of; None: of one that nobody has spoken of.

    ``jobs``: of its owner and name.
    """
    for job in jobs:
        if seen.master or job.master:
            if _may_join(seen, node, job):
                return job
        elif job.id.run == seen.run:
            return job
    return None


def _may_join(seen: RankSeen, node: str, job: FleetJob) -> bool:
    others = {rank: member.node for rank, member in job.members.items()}
    return (
        job.master == seen.master
        and job.world_size == seen.world_size
        and others.get(seen.rank, node) == node
        and (node not in job.nodes or job.run_of(node) == seen.run)
        and abs(seen.time - job.begin_time) <= JOIN_S
    )


def new(seen: RankSeen, taken: Iterable[JobId]) -> JobId:
    """What a job is called that nobody has spoken of."""
    same = {
        job for job in taken if (job.owner, job.base_name) == (seen.owner, seen.job_id.base_name)
    }
    name = seen.job if same else seen.job_id.base_name
    return JobId(seen.owner, name, seen.run)
