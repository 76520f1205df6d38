"""The sections `detection` (one a kind, and what they share) and `anomalies`.

Only what an operator can understand of a kind is a key; what tunes a detector is a constant beside
its algorithm.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from warpwatch_detection.budget import FALSE_ALARMS_PER_JOB_DAY
from warpwatch_telemetry.sections import (
    REAL,
    DetectorConfig,
    NotNegative,
    Positive,
    Section,
)

Budget = Annotated[float, Field(gt=0, le=100), REAL]


class HangConfig(DetectorConfig):
    """No step for longer than anything that the job has shown.

    timeout_s: a first checkpoint may take two minutes. warmup_timeout_s: the same for a rank's
    first steps, compilation takes minutes. stopped_after_s: how long a living process may miss its
    heartbeat, which comes several times a second.
    """

    timeout_s: Positive = 140.0
    warmup_timeout_s: NotNegative = 600.0
    stopped_after_s: Positive = 10.0


class XidConfig(DetectorConfig):
    """``min_severity``: XIDs of severity info, as of a program that was killed, need no one.

    ``ignored``: numbers that are never raised.
    """

    min_severity: Literal["info", "warning", "critical"] = "warning"
    ignored: tuple[int, ...] = ()


class DeviceIdleConfig(DetectorConfig):
    """``after_s``: in use and idle; longer than checkpoints and evaluations on the CPU take."""

    after_s: Positive = 600.0


class DetectionConfig(Section):
    """What holds for all kinds, then one section a kind.

    false_alarms_per_job_day: what the limits of those that judge noise follow from (budget.py).
    """

    false_alarms_per_job_day: Budget = FALSE_ALARMS_PER_JOB_DAY
    step_regression: DetectorConfig = DetectorConfig()
    step_drift: DetectorConfig = DetectorConfig()
    run_regression: DetectorConfig = DetectorConfig()
    step_spikes: DetectorConfig = DetectorConfig()
    comm_slow: DetectorConfig = DetectorConfig()
    data_stall: DetectorConfig = DetectorConfig()
    straggler: DetectorConfig = DetectorConfig()
    gc_pause: DetectorConfig = DetectorConfig()
    hang: HangConfig = HangConfig()
    memory_leak: DetectorConfig = DetectorConfig()
    memory_pressure: DetectorConfig = DetectorConfig()
    oom: DetectorConfig = DetectorConfig()
    crash: DetectorConfig = DetectorConfig()
    device_needs_service: DetectorConfig = DetectorConfig()
    device_lost: DetectorConfig = DetectorConfig()
    device_stuck: DetectorConfig = DetectorConfig()
    xid: XidConfig = XidConfig()
    ecc_uncorrectable: DetectorConfig = DetectorConfig()
    row_remap: DetectorConfig = DetectorConfig()
    thermal_throttle: DetectorConfig = DetectorConfig()
    power_brake: DetectorConfig = DetectorConfig()
    overheating: DetectorConfig = DetectorConfig()
    clock_drop: DetectorConfig = DetectorConfig()
    pcie_degraded: DetectorConfig = DetectorConfig()
    nvlink_error: DetectorConfig = DetectorConfig()
    network_link_down: DetectorConfig = DetectorConfig()
    network_errors: DetectorConfig = DetectorConfig()
    device_idle: DeviceIdleConfig = DeviceIdleConfig()


class AnomaliesConfig(Section):
    """How long an anomaly lives.

    ``hold_s``: how long an event (crash, oom, xid, …) stays active after its last one; long enough
    that a page in the night still finds it. ``reopen_s``: what comes back so soon after its end is
    the same anomaly; twice a usual scrape and alert interval of 60 s.
    """

    hold_s: NotNegative = 600.0
    reopen_s: NotNegative = 120.0
