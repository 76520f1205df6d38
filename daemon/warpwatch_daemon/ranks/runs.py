"""Which run of a job a ring is of, by what name it is shown, and which rank of it goes on."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from warpwatch.protocol import ProtocolError
from warpwatch_daemon.ranks.rank import Rank
from warpwatch_daemon.ranks.saved import SavedRank
from warpwatch_daemon.ranks.table import OpenRing
from warpwatch_telemetry.jobs import JobId, run_mark

# Where nothing says which start it is of, a rank that began so long after the first is of another.
JOIN_S = 600.0


def find(
    ring: OpenRing, ranks: Sequence[Rank], saved: SavedRank | None
) -> tuple[JobId, Rank | None]:
    """The job of a ring, and the ended rank of it that the ring continues.

    saved: what was kept of the ring over a restart of the daemon: it stays what it was.
    Raises ProtocolError("duplicate_rank") where another live process is that rank of that run.
    """
    if saved is not None and saved.run:
        job = saved.job_id
        return job, _continued([rank for rank in ranks if rank.job == job], ring)
    runs: dict[JobId, list[Rank]] = {}
    for rank in ranks:
        if rank.job.owner == ring.owner and rank.claimed_job == ring.claims.job:
            runs.setdefault(rank.job, []).append(rank)
    for job, members in runs.items():
        is_named = job.run == ring.claims.run and not _is_alone(members, ring)
        if is_named or (not ring.claims.run and _may_join(members, ring)):
            return job, _continued(members, ring)
    return _new(ring, ranks), None


def _continued(members: Sequence[Rank], ring: OpenRing) -> Rank | None:
    rank = next((one for one in members if one.rank == ring.claims.rank), None)
    if rank is not None and rank.live:
        what = f"rank {rank.rank} of {rank.job.name} has another live process"
        raise ProtocolError("duplicate_rank", what)
    return rank


def _is_alone(members: Sequence[Rank], ring: OpenRing) -> bool:
    """Whether it is a program of its own beside another one of the same id.

    A Slurm allocation may run many: without peers there is nothing that they would join.
    """
    return ring.claims.world_size == 1 and any(rank.live for rank in members)


def _may_join(members: Sequence[Rank], ring: OpenRing) -> bool:
    """Whether a ring that names no run is of the one that these ranks are of.

    A rank that died is succeeded at any time; a run whose ranks have all ended in order is over.
    """
    said = ring.claims
    first = min(rank.first_time for rank in members)
    same = [rank for rank in members if rank.rank == said.rank]
    return (
        all(not rank.claims.run for rank in members)
        and all(rank.claims.world_size == said.world_size for rank in members)
        and all(rank.claims.master == said.master for rank in members)
        and any(rank.status != "exited" for rank in members)
        and not any(rank.live for rank in same)
        and (bool(same) or abs(ring.created_time - first) <= JOIN_S)
    )


def _new(ring: OpenRing, ranks: Iterable[Rank]) -> JobId:
    own = [rank for rank in ranks if rank.job.owner == ring.owner]
    mark = ring.name.removesuffix(".ring")[-6:]
    run = ring.claims.run
    if not run:
        run = f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime(ring.created_time))}-{mark}"
    elif any(rank.job.run == run and rank.claimed_job == ring.claims.job for rank in own):
        run = f"{run}-{mark}"
    name = ring.claims.job
    taken = {rank.job.name for rank in own if rank.live}
    if name in taken:
        name += run_mark(run)
    if name in taken:
        name = f"{name}-{mark}"
    return JobId(ring.owner, name, run)
