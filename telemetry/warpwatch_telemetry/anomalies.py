"""Defines the closed set of anomaly kinds, one anomaly with its sentence, and its context."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from warpwatch_telemetry.jobs import JobId

Severity = Literal["info", "warning", "critical"]
# From the least to the most severe.
SEVERITIES: tuple[Severity, ...] = ("info", "warning", "critical")
# The subject of an anomaly: a program, a device or the node, the agent itself.
Scope = Literal["job", "hardware", "agent"]

JOB_KINDS = (
    "step_regression", "step_drift", "step_spikes", "run_regression", "data_stall", "comm_slow",
    "straggler", "gc_pause", "hang", "memory_leak", "memory_pressure", "oom", "crash",
    "latency_regression", "queue_growth", "kv_thrash",
)  # fmt: skip
DEVICE_KINDS = (
    "device_needs_service", "device_lost", "device_stuck", "xid", "ecc_uncorrectable", "row_remap",
    "thermal_throttle", "power_brake", "clock_drop", "pcie_degraded", "nvlink_error",
    "network_link_down", "network_errors", "device_idle", "overheating",
)  # fmt: skip
KINDS = JOB_KINDS + DEVICE_KINDS
# All nodes of a job see these at once: only the daemon with rank 0 acts on them.
WHOLE_JOB_KINDS = frozenset(
    {"step_regression", "step_drift", "step_spikes", "run_regression", "comm_slow"}
)
# Kinds about a job or a rank among its peers are evaluated where all ranks are visible.
FLEET_KINDS = WHOLE_JOB_KINDS | {
    "straggler", "data_stall", "hang", "crash", "latency_regression", "queue_growth", "kv_thrash",
}  # fmt: skip
# Kinds that are events, not states, stay active for a while after the last one.
EVENT_KINDS = frozenset({"crash", "oom", "xid", "ecc_uncorrectable", "row_remap"})


def scope_of(kind: str) -> Scope:
    return "job" if kind in JOB_KINDS else "hardware"


@dataclass(frozen=True, slots=True)
class Detected:
    """A fault of a device, a rank or a job, as a detector reports it.

    time: wall clock, seconds. step: the newest one at that time; begin_step: where it began.
    value, baseline: the evaluated quantity and its comparison, in the kind's own unit.
    summary: the cause in one sentence with numbers, then more facts after ``; ``.
    owner, job, run: the job, as in JobId. gpu: the index of the device, None for a port.
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
    """The worst moment of an anomaly; fields as in ``Detected``."""

    time: float
    summary: str
    step: int | None = None
    value: float | None = None
    baseline: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Anomaly(Detected):
    """An anomaly from its opening (``time``, ``step``) to its end.

    ``value``, ``baseline`` and ``summary`` are the newest while it is active, then the worst.

    end_time: None while active.
    worst: its worst moment so far; None if an older daemon stored it.
    explained_by: the id of the anomaly that caused it, and ended it.
    effects: on jobs, one sentence each, which the summary has too.
    evidence: for a cause, one sentence each, which the summary has too.
    reopened: how often it came back within ``anomalies.reopen_s`` of its end.
    node, judged_by: in a fleet, the node of the rank or device, and the finder.
    first_summary: the summary at its opening or the last rise of its severity; empty if an older
        daemon stored it.
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
    """The series of one job, rank or device, in points of ``AnomalyContext.interval_s``.

    times: the start of each point (wall clock, seconds). counts: its steps or readings.
    values: by series, one for each time, None if unknown. A job and a rank have means over the
        steps that ended in the point: ``step_duration_s``, ``step_duration_max_s``,
        ``phase_s{phase=…}``, ``tokens_per_s``, ``samples_per_s``, ``memory_allocated_bytes``.
        A device has means of its gauges, named as in the telemetry log.
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
    """Return the sentence, then evidence and effects. node: of one that names none."""
    cause, _, more = anomaly.summary.partition("; ")
    text = _located(anomaly, cause, node)
    return f"{text}; {more}" if more else text


def first_sentence(anomaly: Anomaly, node: str = "") -> str:
    """Return the sentence with the cause as it was first found, for a label: it never changes."""
    cause, _, _ = anomaly.first_summary.partition("; ")
    return _located(anomaly, cause or anomaly.kind.replace("_", " "), node)


def _located(anomaly: Anomaly, cause: str, node: str) -> str:
    if len(cause) > MAX_CAUSE_CHARS:
        cause = f"{cause[: MAX_CAUSE_CHARS - 1]}…"
    # A fleet's anomaly without a node is on several.
    node = anomaly.node or ("" if anomaly.judged_by == "fleet" else node)
    text = f"{cause}: {', '.join((*_places(anomaly, node), _when(anomaly)))}"
    # Exceptions have several lines, and names may.
    return " ".join(text.split())


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
