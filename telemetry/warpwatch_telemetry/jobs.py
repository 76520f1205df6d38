"""Defines the identity of a job, its owner, name and run, and the summary of a run."""

from __future__ import annotations

import functools
import hashlib
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypedDict

# A pod with folders of its own, or the user of files in the shared folders.
Owner = int | str


class JobFields(TypedDict):
    """A job as the fields of a record or a document."""

    owner: str
    job: str
    run: str


class JobId(NamedTuple):
    """The identity of a job.

    owner: ``ns/<namespace>`` from the kubelet, else ``uid/<n>``; a fact, not a claim. Empty in logs
        of one owner.
    name: the shown name. A second live run of one owner's name is ``name#<6 digits of run>``.
    run: distinguishes starts; empty if unknown.
    """

    owner: str
    name: str
    run: str

    def fields(self) -> JobFields:
        return {"owner": self.owner, "job": self.name, "run": self.run}

    @property
    def base_name(self) -> str:
        """The program's own name, the same on every node: without the mark of a second live run."""
        return self.name.removesuffix(run_mark(self.run))


def whose(owner: str) -> tuple[str, str]:
    """Return an owner's namespace and user of the node, one of which is empty."""
    kind, _, name = owner.partition("/")
    return (name, "") if kind == "ns" else ("", name)


def run_mark(run: str) -> str:
    """Return the mark of a second live run of the same name and owner: ``#<6 digits>``."""
    return f"#{hashlib.sha256(run.encode(errors='replace')).hexdigest()[:6]}"


# Asked of every record that is streamed.
@functools.lru_cache(maxsize=4096)
def shard_key(job: JobId) -> int:
    """Return the key that, modulo their number, selects the job's fleet on all of its nodes."""
    return zlib.crc32("\0".join((job.owner, job.base_name)).encode(errors="replace"))


SCHEMA = 1


@dataclass(frozen=True, slots=True)
class RunSummary:
    """A run as one daemon saw it. Times are wall clock in seconds, other figures SI units.

    time: the summary's; first_time: start of the first process; end_time: None while it runs.
    ranks: on this node, of ``world_size``. gpu_model: of their devices. version: Warpwatch's.
    steps: of the rank with the most.
    judged_steps: of all ranks, without warm-up and steps of captures. The next fields are means of
        these over ranks, without checkpoints and evaluations; unknown ones are None.
    step_p50_s, step_p95_s: percentiles, to 1 %. phases_s: seconds per step; ``other``: the rest.
    tokens_per_s, samples_per_s: of all ranks on this node. energy_j: of their devices.
    anomalies: opened ones by kind. captures: the newest ids.
    step_counts: steps by the number of the histogram's bin (docs/runs.md).
    latencies: of a server, by first_token, inter_token and queue, their number and seconds.
    works: of a server, by kind of work, the iterations and the sum of their seconds' logarithms.
    remote: the address of its copy, None until it is there.
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
    latencies: Mapping[str, tuple[int, float]] = field(default_factory=dict)
    works: Mapping[str, tuple[int, float]] = field(default_factory=dict)
    remote: str | None = None
    schema: int = SCHEMA

    @property
    def job_id(self) -> JobId:
        return JobId(self.owner, self.job, self.run)

    @property
    def is_server(self) -> bool:
        """Whether its steps are the iterations of an inference server."""
        return self.step_clock == "iteration()"

    @property
    def a_step(self) -> str:
        return "an iteration" if self.is_server else "a step"

    @property
    def counted_steps(self) -> str:
        return f"{self.steps} {'iterations' if self.is_server else 'steps'}"
