"""Which job something is of: who owns it, what it is called, and which start of it is meant."""

from __future__ import annotations

import functools
import hashlib
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypedDict

# A pod with folders of its own, or the user of files in the folders of all.
Owner = int | str


class JobFields(TypedDict):
    """A job as the fields of a record or a document."""

    owner: str
    job: str
    run: str


class JobId(NamedTuple):
    """A job is known by owner, name and run; what any of them says is never looked up elsewhere.

    owner: ``ns/<namespace>`` as the kubelet says it, else ``uid/<n>``; a fact, never a claim. Empty
    in logs of one owner.
    name: as it is shown. A second live run of one owner's name is ``name#<6 digits of run>``.
    run: tells one start from the next; empty where nothing does.
    """

    owner: str
    name: str
    run: str

    def fields(self) -> JobFields:
        return {"owner": self.owner, "job": self.name, "run": self.run}

    @property
    def base_name(self) -> str:
        """What its program calls it, on every node: without the mark of a second live run."""
        return self.name.removesuffix(run_mark(self.run))


def whose(owner: str) -> tuple[str, str]:
    """The namespace, or the user of the node, that an owner is: one of them is empty."""
    kind, _, name = owner.partition("/")
    return (name, "") if kind == "ns" else ("", name)


def run_mark(run: str) -> str:
    """What tells a run from another live one of the same name and owner: ``#<6 digits>``."""
    return f"#{hashlib.sha256(run.encode(errors='replace')).hexdigest()[:6]}"


# Asked of every record that is streamed.
@functools.lru_cache(maxsize=4096)
def shard_key(job: JobId) -> int:
    """Modulo their number, which of several fleets judges the job; the same on all of its nodes."""
    return zlib.crc32("\0".join((job.owner, job.base_name)).encode(errors="replace"))


SCHEMA = 1


@dataclass(frozen=True, slots=True)
class RunSummary:
    """A run as one daemon saw it. Times are wall clock in seconds, other figures SI units.

    time: when it was summed up; first_time: when its first process began; end_time: None while it
    runs. ranks: those that this daemon saw, of ``world_size``. gpu_model: of all of their devices;
    framework: as the shim says it; version: Warpwatch's.
    steps: of the rank with the most. judged_steps: of all ranks together, without warm-up and those
    that a capture touched; what follows is of these, and of one rank, without the time of
    checkpoints and evaluations.
    step_p50_s, step_p95_s: percentiles, to 1 %. phases_s: mean seconds a step, ``other`` is what no
    phase says. tokens_per_step, samples_per_step: means; tokens_per_s, samples_per_s: of all ranks
    that this daemon saw. energy_j: of their devices. What is not known is None.
    anomalies: how many were raised, by kind. captures: ids of the newest.
    step_counts: how many steps took so long, by the number of the histogram's bin
    (docs/runs.md); remote: the address of its copy, None until it is there.
    """

    owner: str
    job: str
    run: str
    time: float
    first_time: float
    end_time: float | None = None
    node: str = ""
    world_size: int = 1
    ranks: tuple[int, ...] = ()
    gpu_model: str | None = None
    framework: str = ""
    step_clock: str = ""
    version: str = ""
    steps: int = 0
    judged_steps: int = 0
    step_p50_s: float | None = None
    step_p95_s: float | None = None
    phases_s: Mapping[str, float] = field(default_factory=dict)
    tokens_per_step: float | None = None
    samples_per_step: float | None = None
    tokens_per_s: float | None = None
    samples_per_s: float | None = None
    energy_j: float | None = None
    anomalies: Mapping[str, int] = field(default_factory=dict)
    captures: tuple[str, ...] = ()
    step_counts: Mapping[int, int] = field(default_factory=dict)
    remote: str | None = None
    schema: int = SCHEMA

    @property
    def job_id(self) -> JobId:
        return JobId(self.owner, self.job, self.run)
