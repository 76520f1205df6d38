"""What is kept of a run: one start of a job, in figures that can be compared with another's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from warpwatch_telemetry.jobs import JobId

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
