"""Defines one profiling request and its result: traces of one or more ranks, or stacks."""

from __future__ import annotations

import hashlib
import re
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from warpwatch_telemetry.jobs import JobId

CaptureKind = Literal["torch", "memory", "stacks", "nsys"]
CAPTURE_KINDS: tuple[CaptureKind, ...] = ("torch", "memory", "stacks", "nsys")
# Captures of some steps, the same on all ranks; stacks are recorded at once.
STEP_KINDS: frozenset[CaptureKind] = frozenset({"torch", "memory", "nsys"})
# Captures that need the GPU's performance counters, which only one user may have at a time.
COUNTER_KINDS: frozenset[CaptureKind] = frozenset({"nsys"})

# A capture of kind torch can also record these, at a cost: Python stacks, shapes, allocations.
CAPTURE_OPTIONS = ("stacks", "shapes", "memory")

# Automatic requests for an anomaly are subject to cooldown and budget, requests of users are not.
# Captures of a healthy job, to compare with, have their own budget: once (baseline), or repeatedly
# by a fleet (schedule).
REGULAR_TRIGGERS = frozenset({"baseline", "schedule"})

# The results of captures: files of all targeted ranks, of some, of none, or the reason why it never
# began, of the policy and of safety.
OUTCOMES = (
    "complete", "partial", "failed", "no_memory", "refused_cooldown", "refused_budget",
    "refused_busy", "refused_disk", "refused_quota", "refused_dry_run", "refused_disabled",
    "refused_no_rank", "refused_no_step", "refused_other_node", "refused_quiet_hours",
    "refused_over", "refused_idle",
)  # fmt: skip

# The outcomes of copies to the remote store: failed is tried again, given_up was removed before.
UPLOAD_OUTCOMES = ("uploaded", "failed", "given_up")

# A rank that takes longer to hand over its file is left out: five steps of a slow job and the
# compression of a large trace take less.
CAPTURE_TIMEOUT_S = 120.0

# The beginning of the detail of an interrupted capture or rank.
INTERRUPTED = "interrupted: "


@dataclass(frozen=True, slots=True)
class AnomalySeen:
    """The known facts of the anomaly that requested a capture.

    They are its rank, first slow step, and the duration relative to the usual one.
    """

    rank: int | None = None
    begin_step: int | None = None
    ratio: float | None = None


@dataclass(frozen=True, slots=True)
class CaptureRequest:
    """A request for a capture. ``ranks`` None means all ranks of the job on this node.

    ``reason`` is for people; an automatic request also has its anomaly.
    options: a subset of CAPTURE_OPTIONS.
    owner, run: as in JobId; empty if only one job has this name.
    alerts: the firings of Alertmanager's alerts that requested it, as ``fingerprint@startsAt``.
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


# The states of a rank in a capture, in order; the last four are final. ``exported``: its file is in
# the inbox; ``written``: the file is in the store.
RANK_STATES = ("asked", "armed", "recording", "exported", "written", "late", "failed", "missing")
RANK_ENDS = frozenset({"written", "late", "failed", "missing"})


@dataclass(frozen=True, slots=True)
class RankCapture:
    """The state of one rank in a capture, with its reason.

    verified: whether the trace is complete, None before it was read; problems: its missing parts.
    events: their number. node: of its file, in a multi-node capture.
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
    """The capture that a node could start now: of these ranks, the fastest has ``begun`` this step.

    steps: to record by each. step_s: the fastest's median step, 0 if unknown. For a kind without
    steps all three are None.
    """

    ranks: tuple[int, ...]
    steps: int | None = None
    begun: int | None = None
    step_s: float | None = None


@dataclass(frozen=True, slots=True)
class Residual:
    """The lasting effect of a capture: one rank's median step after it, by the one before.

    steps: on the side with fewer. slower: by more than 5 % and more than chance explains.
    """

    ratio: float
    steps: int
    slower: bool


@dataclass(frozen=True, slots=True)
class Capture:
    """A capture from request to diagnosis. Times are wall clock in seconds.

    outcome: one of OUTCOMES, None while it runs.
    steps: to record by each rank; fewer than requested if they would cost too much.
    expected_cost_s: the expected ``cost_s``, None if unknown.
    step_s: median step seconds of the job ``before``, ``during`` and ``after``; empty at first.
    cost_s: lost by starting, recording, stopping and export; None at first.
    diagnosis: its JSON (docs/diagnosis.md), None until there is one.
    baseline_id: the capture of the healthy job that the diagnosis compares with.
    remote: the address of its complete copy in the remote store, else None.
    of_fleet: whether it is this node's part of a multi-node capture.
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


# The outcomes of an anomaly's trigger or an alert, besides the refusals of OUTCOMES: a capture
# began, may still begin, or is not wanted for the kind, whose recipe is switched off.
CAPTURED = "captured"
WAITING = "waiting"
NO_RECIPE = "no_recipe"


@dataclass(frozen=True, slots=True)
class Decision:
    """The decision to capture an anomaly or not. time: wall clock in seconds; detail: for people.

    outcome: CAPTURED, WAITING, NO_RECIPE, or a refusal of OUTCOMES.
    """

    time: float
    anomaly_id: str
    outcome: str
    detail: str = ""
    capture_id: str | None = None


# The second and third try of a multi-node capture have names of their own on each node.
CAPTURE_ID = re.compile(r"^\d{8}T\d{6}-[0-9a-f]{6}(-[23])?$")
_TRY = re.compile(r"-[23]$")


def new_capture_id(now: float) -> str:
    """Return the time of the request and random digits. ``now``: wall clock in seconds."""
    return f"{_timestamp(now)}-{secrets.token_hex(3)}"


def capture_id_of_anomaly(anomaly_id: str, number: int, now: float) -> str:
    """Return the id of an anomaly's capture, the same for every requester.

    number: the count of its earlier captures. The ids of a fleet's anomalies begin with their time.
    """
    at = int(anomaly_id[:8], 16) if re.match(r"[0-9a-f]{8}-", anomaly_id) else now
    digest = hashlib.sha256(f"{anomaly_id}#{number}".encode()).hexdigest()[:6]
    return f"{_timestamp(at)}-{digest}"


def _timestamp(wall_s: float) -> str:
    return time.strftime("%Y%m%dT%H%M%S", time.gmtime(wall_s))


def remote_place(capture_id: str) -> str:
    """Return the path in a remote store, the same on all nodes of a capture."""
    name = base_id(capture_id)
    return f"{name[:4]}/{name[4:6]}/{name[6:8]}/{name}"


def base_id(capture_id: str) -> str:
    """Return the id of the multi-node capture that this id is a try of."""
    return _TRY.sub("", capture_id)
