"""The closed set of anomaly kinds, one finding, and the metrics of the minutes around it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from warpwatch_telemetry.jobs import JobId

Severity = Literal["info", "warning", "critical"]
# What an anomaly is about: somebody's program, a device or the node, the agent itself.
Scope = Literal["job", "hardware", "agent"]

JOB_KINDS = (
    "step_regression",
    "step_drift",
    "step_spikes",
    "run_regression",
    "data_stall",
    "comm_slow",
    "straggler",
    "gc_pause",
    "hang",
    "memory_leak",
    "memory_pressure",
    "oom",
    "crash",
)
DEVICE_KINDS = (
    "device_needs_service",
    "device_lost",
    "device_stuck",
    "xid",
    "ecc_uncorrectable",
    "row_remap",
    "thermal_throttle",
    "power_brake",
    "clock_drop",
    "pcie_degraded",
    "nvlink_error",
    "network_link_down",
    "network_errors",
    "device_idle",
    "overheating",
)
KINDS = JOB_KINDS + DEVICE_KINDS
# Kinds that all nodes of a job see at once: only the daemon that has rank 0 acts on them.
WHOLE_JOB_KINDS = frozenset(
    {"step_regression", "step_drift", "step_spikes", "run_regression", "comm_slow"}
)
# Kinds about a job or a rank among its peers: judged where all ranks are seen.
FLEET_KINDS = WHOLE_JOB_KINDS | {"straggler", "data_stall", "hang", "crash"}
# Kinds that are events, not states: they stay active for a while after the last one.
EVENT_KINDS = frozenset({"crash", "oom", "xid", "ecc_uncorrectable", "row_remap"})


def scope_of(kind: str) -> Scope:
    return "job" if kind in JOB_KINDS else "hardware"


@dataclass(frozen=True, slots=True)
class Detected:
    """Something is wrong with a device, a rank or a job, in a detector's words.

    time: wall clock, seconds. step: the newest one then; begin_step: where it began.
    value, baseline: the quantity judged and what it is compared with, in the kind's own unit.
    summary: the cause in one sentence with numbers, then after ``; `` what else is known of it.
    owner, job, run: of which job, as JobId has them. gpu: the index of the device, None of a port.
    """

    time: float
    severity: Severity
    summary: str
    job: str | None = None
    rank: int | None = None
    device: str | None = None
    step: int | None = None
    begin_step: int | None = None
    value: float | None = None
    baseline: float | None = None
    owner: str = ""
    run: str = ""
    gpu: int | None = None

    @property
    def job_id(self) -> JobId | None:
        return None if self.job is None else JobId(self.owner, self.job, self.run)


@dataclass(frozen=True, slots=True)
class Worst:
    """What was found when an anomaly was at its worst; fields as in ``Detected``."""

    time: float
    summary: str
    step: int | None = None
    value: float | None = None
    baseline: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Anomaly(Detected):
    """What was found, from when it was raised (``time``, ``step``) to its end.

    ``value``, ``baseline`` and ``summary`` are the newest while it is active, then its worst.

    end_time: when it was over, None while active.
    worst: its worst moment so far; None of an anomaly that an older daemon kept.
    explained_by: the id of the anomaly that turned out to be its cause, which also ended it.
    effects: what it does to jobs, one sentence each; the summary has them too.
    evidence: what was seen beside it and speaks for a cause, a sentence each; in the summary, too.
    reopened: how often it came back within ``anomalies.reopen_s`` of its end and went on.
    node, judged_by: of a fleet, where the rank or device is, and who found it.
    first_summary: the summary as it was opened, or when its severity rose last; empty of an
    anomaly that an older daemon kept.
    """

    id: str
    kind: str
    end_time: float | None = None
    explained_by: str | None = None
    effects: tuple[str, ...] = ()
    evidence: tuple[str, ...] = ()
    reopened: int = 0
    worst: Worst | None = None
    node: str = ""
    judged_by: Literal["agent", "fleet"] = "agent"
    first_summary: str = ""


@dataclass(frozen=True, slots=True)
class ContextSeries:
    """What one job, rank or device did, in points of ``AnomalyContext.interval_s``.

    times: where each point begins (wall clock, seconds); values: by series, one for each time,
    None where nothing is known. Of a job and rank, means over the steps that ended in the point:
    ``step_duration_s``, ``step_duration_max_s``, ``phase_s{phase=…}``, ``tokens_per_s``,
    ``samples_per_s``, ``memory_allocated_bytes``; of a device, means of its gauges by their names
    in the telemetry log.
    counts: steps or readings of each point.
    """

    times: tuple[float, ...]
    counts: tuple[int, ...]
    values: Mapping[str, tuple[float | None, ...]]
    job: str | None = None
    rank: int | None = None
    device: str | None = None


@dataclass(frozen=True, slots=True)
class AnomalyContext:
    """The metrics of the minutes around an anomaly: of its job, its rank and its device."""

    interval_s: float
    series: tuple[ContextSeries, ...] = ()


# A cause may hold an exception's text; what comes after it must not be cut off.
MAX_CAUSE_CHARS = 200


def sentence(anomaly: Anomaly, node: str = "") -> str:
    """Return the sentence, then what speaks for the cause and what the fault does.

    node: of the agent that found it, where the anomaly does not name its own.
    """
    cause, _, more = anomaly.summary.partition("; ")
    said = _said(anomaly, cause, node)
    return f"{said}; {more}" if more else said


def first_sentence(anomaly: Anomaly, node: str = "") -> str:
    """Return the sentence with the cause as it was first found, for a label: it never changes."""
    cause, _, _ = anomaly.first_summary.partition("; ")
    return _said(anomaly, cause or anomaly.kind.replace("_", " "), node)


def _said(anomaly: Anomaly, cause: str, node: str) -> str:
    if len(cause) > MAX_CAUSE_CHARS:
        cause = f"{cause[: MAX_CAUSE_CHARS - 1]}…"
    # What a fleet finds without a node is on several.
    node = anomaly.node or ("" if anomaly.judged_by == "fleet" else node)
    said = f"{cause}: {', '.join((*_places(anomaly, node), _when(anomaly)))}"
    # Exceptions have several lines, and names may.
    return " ".join(said.split())


def _places(anomaly: Anomaly, node: str) -> list[str]:
    """Return the device and the rank or job, the first of them with the node."""
    device = f"GPU {anomaly.gpu}" if anomaly.gpu is not None else ""
    if not device and anomaly.kind in DEVICE_KINDS:
        device = anomaly.device or ""
    rank = "" if anomaly.rank is None else f"rank {anomaly.rank} of "
    owner = f" ({anomaly.owner})" if anomaly.owner else ""
    whose = "" if anomaly.job is None else f"{rank}{anomaly.job}{owner}"
    places = [place for place in (device, whose) if place]
    if node:
        places[:1] = [" ".join((*places[:1], "on", node))]
    return places


def _when(anomaly: Anomaly) -> str:
    begin = _utc(anomaly.time)
    if anomaly.end_time is None:
        return f"since {begin}"
    end = _utc(anomaly.end_time)
    if begin[5:] == end[5:]:
        begin = begin[:5]
    return f"from {begin} to {end}"


def _utc(wall_s: float) -> str:
    """Return the minute and the day; agents may report a time that no calendar has."""
    try:
        return time.strftime("%H:%M UTC on %d %b", time.gmtime(wall_s))
    except (OverflowError, ValueError, OSError):
        return "an unknown time"
