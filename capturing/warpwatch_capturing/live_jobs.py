"""The jobs that run, and the one that a request names."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

from warpwatch_telemetry.captures import CaptureRequest
from warpwatch_telemetry.errors import Refused
from warpwatch_telemetry.jobs import JobId

# The reply to a wrong name lists so many right ones.
MAX_NAMED = 20


class LiveJob(NamedTuple):
    """A job, and its ranks that run and can be captured."""

    id: JobId
    ranks: Collection[int]
    world_size: int


def find(jobs: Iterable[LiveJob], request: CaptureRequest) -> LiveJob:
    """Return the one job that the request names, with all ranks that it names. Raises Refused."""
    live = [job for job in jobs if job.ranks]
    named = sorted(job for job in live if _is_named(job.id, request))
    if len(named) > 1:
        owners = ", ".join(job.id.owner for job in named)
        raise Refused(
            "refused_no_rank", f"{request.job} is a job of each of {owners}; name the owner"
        )
    if not named:
        names = {job.id.name for job in live if request.owner in ("", job.id.owner)}
        known = ", ".join(sorted(names)[:MAX_NAMED]) or "none"
        raise Refused(
            "refused_no_rank",
            f"no running rank of job {request.job!r} is known; running jobs: {known}",
        )
    (job,) = named
    unknown = sorted(set(request.ranks or ()) - set(job.ranks))
    if unknown:
        wrong, right = ", ".join(map(str, unknown)), ", ".join(map(str, sorted(job.ranks)))
        raise Refused(
            "refused_no_rank", f"{request.job} has no running rank {wrong} here, only {right}"
        )
    return job


def _is_named(job: JobId, request: CaptureRequest) -> bool:
    """Return whether the request matches the job; an empty field matches any."""
    return all(said in ("", known) for said, known in zip(request.job_id, job, strict=True))
