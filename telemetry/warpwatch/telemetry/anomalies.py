"""The closed set of anomaly kinds, and one finding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Severity = Literal["info", "warning", "critical"]

JOB_KINDS = (
    "step_regression",
    "step_drift",
    "step_spikes",
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
    "device_idle",
    "overheating",
)
KINDS = JOB_KINDS + DEVICE_KINDS
# Kinds that all nodes of a job see at once: only the daemon that has rank 0 acts on them.
WHOLE_JOB_KINDS = frozenset({"step_regression", "step_drift", "step_spikes", "comm_slow"})
# Kinds that are events, not states: they stay active for a while after the last one.
EVENT_KINDS = frozenset({"crash", "oom", "xid", "ecc_uncorrectable", "row_remap"})


@dataclass(frozen=True, slots=True)
class Anomaly:
    """A finding about a device, a rank or a job.

    time: when it was raised (wall clock, seconds); end_time: when it was over, None while active.
    step: the newest step when it was raised; begin_step: where it began.
    value, baseline: the quantity judged and what it is compared with, in the kind's own unit.
    summary: one sentence with numbers.
    """

    id: str
    time: float
    kind: str
    severity: Severity
    summary: str
    job: str | None = None
    rank: int | None = None
    device: str | None = None
    step: int | None = None
    begin_step: int | None = None
    value: float | None = None
    baseline: float | None = None
    end_time: float | None = None
