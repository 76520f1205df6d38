"""Which job a request means, and which of its ranks are captured where nobody has said."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping

from warpwatch_capturing.live_jobs import MAX_NAMED
from warpwatch_fleet.captures.part import Part
from warpwatch_fleet.cluster import Cluster
from warpwatch_fleet.jobs import FleetJob
from warpwatch_telemetry.captures import STEP_KINDS, CaptureRequest
from warpwatch_telemetry.errors import Refused

# More traces than a person compares, and as many exports at a time as a shared disk stands.
MAX_RANKS = 16
# Enough to tell what is usual.
PEERS = 3


def spread(nodes: Mapping[int, str], count: int) -> tuple[int, ...]:
    """``count`` of these ranks, over as many nodes as there are."""
    before: Counter[str] = Counter()
    turns = []
    for rank, node in sorted(nodes.items()):
        turns.append((before[node], rank))
        before[node] += 1
    return tuple(sorted(rank for _, rank in sorted(turns)[:count]))


def choose(nodes: Mapping[int, str], named: Collection[int]) -> tuple[int, ...]:
    """All of a small job; else those that are named and three peers, each of another node.

    ``nodes``: of each live rank. Where nobody is named it is one rank a node, MAX_RANKS in all.
    """
    if len(nodes) <= MAX_RANKS:
        return tuple(sorted(nodes))
    chosen = sorted(nodes.keys() & set(named))[: MAX_RANKS - PEERS]
    count = len(chosen) + PEERS if chosen else MAX_RANKS
    seen = {nodes[rank] for rank in chosen}
    for rank, node in sorted(nodes.items()):
        if node not in seen and len(chosen) < count:
            seen.add(node)
            chosen.append(rank)
    return tuple(sorted(chosen))


def find_job(cluster: Cluster, request: CaptureRequest) -> FleetJob:
    """The one job that is meant, of those that run. Raises Refused."""
    live = [job for job in cluster.jobs.values() if job.live_nodes()]
    meant = [job for job in live if _is_meant(job, request)]
    if len(meant) > 1:
        owners = ", ".join(sorted(job.id.owner for job in meant))
        raise Refused(
            "refused_no_rank", f"{request.job} is a job of each of {owners}; name the owner"
        )
    if not meant:
        names = {job.id.name for job in live if request.owner in ("", job.id.owner)}
        known = ", ".join(sorted(names)[:MAX_NAMED]) or "none"
        raise Refused(
            "refused_no_rank",
            f"no running rank of job {request.job!r} is known; running jobs: {known}",
        )
    return meant[0]


def parts_of(cluster: Cluster, job: FleetJob, request: CaptureRequest) -> list[Part]:
    """The nodes of the ranks that are asked for, or that the fleet chooses. Raises Refused."""
    live = {rank: member.node for rank, member in job.members.items() if member.is_live}
    ranks = request.ranks or _chosen(cluster, job, request, live)
    unknown = sorted(set(ranks) - live.keys())
    if unknown:
        names, known = ", ".join(map(str, unknown)), ", ".join(map(str, sorted(live)))
        raise Refused("refused_no_rank", f"{request.job} has no running rank {names}, only {known}")
    return [
        _part(cluster, job, address, tuple(rank for rank in ranks if live[rank] == address))
        for address in sorted({live[rank] for rank in ranks})
    ]


def _part(cluster: Cluster, job: FleetJob, address: str, ranks: tuple[int, ...]) -> Part:
    node = cluster.nodes.get(address)
    if node is None:
        raise Refused("refused_no_rank", f"{address} is no longer a target of the fleet")
    lost = "" if node.up else f"cannot be followed: {node.reason}"
    return Part(node.name, node.target, job.nodes[address], ranks, lost)


def _chosen(
    cluster: Cluster, job: FleetJob, request: CaptureRequest, live: Mapping[int, str]
) -> tuple[int, ...]:
    """Stacks cost next to nothing: they are taken of all."""
    if request.kind not in STEP_KINDS:
        return tuple(sorted(live))
    active = [one for one in cluster.anomalies() if one.end_time is None]
    return choose(
        live,
        [one.rank for one in active if one.rank is not None and one.job_id in job.names()],
    )


def _is_meant(job: FleetJob, request: CaptureRequest) -> bool:
    """What the request leaves open may be anything."""
    return all(said in ("", known) for said, known in zip(request.job_id, job.id, strict=True))
