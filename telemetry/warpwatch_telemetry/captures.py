"""One profiling request and what it brought: traces of one or more ranks, or stacks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from warpwatch_telemetry.jobs import JobId

CaptureKind = Literal["torch", "memory", "stacks", "nsys"]
CAPTURE_KINDS: tuple[CaptureKind, ...] = ("torch", "memory", "stacks", "nsys")
# Captures of some steps, the same on all ranks; stacks are taken at once.
STEP_KINDS: frozenset[CaptureKind] = frozenset({"torch", "memory", "nsys"})
# Captures that need the GPU's performance counters, which only one user may have at a time.
COUNTER_KINDS: frozenset[CaptureKind] = frozenset({"nsys"})

# What a capture of kind torch records besides, at a price: Python stacks, shapes, allocations.
CAPTURE_OPTIONS = ("stacks", "shapes", "memory")

# Who asked. An anomaly's automatic request is subject to cooldown and budget; a person's is not.
# What is taken of a healthy job, and later ones are compared with, has its own budget: once
# (baseline), or by a fleet again and again (schedule).
REGULAR_TRIGGERS = frozenset({"baseline", "schedule"})

# How a capture ended: every targeted rank brought its file, some did, none did, or it was never
# begun and why (the reasons of the policy and of safety).
OUTCOMES = (
    "complete",
    "partial",
    "failed",
    "no_memory",
    "refused_cooldown",
    "refused_budget",
    "refused_busy",
    "refused_disk",
    "refused_quota",
    "refused_dry_run",
    "refused_disabled",
    "refused_no_rank",
    "refused_no_step",
    "refused_other_node",
    "refused_quiet_hours",
    "refused_over",
)

# What became of a copy for the remote store: failed is tried again, given_up was removed before.
UPLOAD_OUTCOMES = ("uploaded", "failed", "given_up")

# How long a rank may take to hand over its file before it is left out: five steps of a slow job
# and the compression of a large trace.
CAPTURE_TIMEOUT_S = 120.0

# How the detail of a capture, or of one rank of it, begins that something came in between.
INTERRUPTED = "interrupted: "


@dataclass(frozen=True, slots=True)
class AnomalySeen:
    """What the anomaly that asked had seen, as far as it is known: of which rank, since which step,
    and how many times as long as usual it took."""

    rank: int | None = None
    begin_step: int | None = None
    ratio: float | None = None


@dataclass(frozen=True, slots=True)
class CaptureRequest:
    """What was asked for. ``ranks`` None means all ranks of the job that this daemon sees.

    ``reason`` is for people; an automatic request also carries the anomaly that asked.
    options: of CAPTURE_OPTIONS.
    owner, run: of which job of this name, as JobId has them; empty for the only one there is.
    alerts: which firings of Alertmanager's alerts asked, as ``fingerprint@startsAt``.
    """

    job: str
    kind: CaptureKind
    trigger: str
    ranks: tuple[int, ...] | None = None
    steps: int = 5
    options: tuple[str, ...] = ()
    reason: str = ""
    anomaly_id: str | None = None
    anomaly_kind: str | None = None
    anomaly_seen: AnomalySeen | None = None
    alerts: tuple[str, ...] = ()
    owner: str = ""
    run: str = ""

    @property
    def job_id(self) -> JobId:
        return JobId(self.owner, self.job, self.run)


# What a rank does with a capture, in order; the last four are ends. ``exported``: its file lies in
# the inbox; ``written``: the file is in the store.
RANK_STATES = ("asked", "armed", "recording", "exported", "written", "late", "failed", "missing")
RANK_ENDS = frozenset({"written", "late", "failed", "missing"})


@dataclass(frozen=True, slots=True)
class RankCapture:
    """How far one rank came, and why not further.

    verified: whether the trace holds what was asked for, None before it was read; problems: what
    it lacks. events: how many it has. node: which one has its file, of a capture over nodes.
    """

    rank: int
    state: str = "asked"
    detail: str = ""
    file: str | None = None
    first_step: int | None = None
    last_step: int | None = None
    verified: bool | None = None
    problems: tuple[str, ...] = ()
    events: int | None = None
    node: str | None = None


@dataclass(frozen=True, slots=True)
class Prepared:
    """What a node would capture now: these ranks, of which the fastest has ``begun`` this step.

    steps: how many each would record. step_s: the median step of the fastest, 0: not known. Of a
    kind without steps all three are None.
    """

    ranks: tuple[int, ...]
    steps: int | None = None
    begun: int | None = None
    step_s: float | None = None


@dataclass(frozen=True, slots=True)
class Residual:
    """What stayed after a capture: the median step after it by the one before, of one rank.

    steps: on the side that has fewer. slower: by more than 5 % and more than chance explains.
    """

    ratio: float
    steps: int
    slower: bool


@dataclass(frozen=True, slots=True)
class Capture:
    """A capture from request to diagnosis. Times are wall clock in seconds.

    outcome: one of OUTCOMES, None while it runs.
    steps: how many each rank is to record; fewer than asked for where they would cost too much.
    expected_cost_s: what ``cost_s`` was expected to be; None where nothing was known.
    step_s: median step seconds of the job ``before``, ``during`` and ``after``. cost_s: what the
    job lost by starting, recording, stopping and export. Both None or empty until it is known.
    diagnosis: the JSON of the diagnosis (docs/diagnosis.md), None until there is one.
    baseline_id: the capture of the same job when it was well that the diagnosis compares with.
    remote: the address of its copy in the remote store, None until all of it is there.
    of_fleet: it is this node's part of a capture over nodes.
    """

    id: str
    request: CaptureRequest
    time: float
    ranks: tuple[RankCapture, ...] = ()
    world_size: int = 1
    steps: int | None = None
    start_step: int | None = None
    recording_time: float | None = None
    end_time: float | None = None
    outcome: str | None = None
    detail: str = ""
    folder: str | None = None
    files: tuple[str, ...] = ()
    step_s: Mapping[str, float] = field(default_factory=dict)
    cost_s: float | None = None
    expected_cost_s: float | None = None
    residual: Residual | None = None
    diagnosis: Mapping[str, Any] | None = None
    diagnosis_outcome: str | None = None
    baseline_id: str | None = None
    remote: str | None = None
    of_fleet: bool = False


# What became of an anomaly's trigger, besides the refusals of OUTCOMES: a capture was begun, may
# still be, or is not wanted for the kind.
CAPTURED = "captured"
WAITING = "waiting"
NO_RECIPE = "no_recipe"


@dataclass(frozen=True, slots=True)
class Decision:
    """Why an anomaly was or was not captured. time: wall clock in seconds; detail: for people.

    outcome: CAPTURED, WAITING, NO_RECIPE, or why not (of OUTCOMES).
    """

    time: float
    anomaly_id: str
    outcome: str
    detail: str = ""
    capture_id: str | None = None
