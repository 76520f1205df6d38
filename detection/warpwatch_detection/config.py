"""The sections `detection` and `anomalies` of the configuration.

A key is something that an operator can decide; the constants that tune a detector are beside its
algorithm.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from warpwatch_detection.budget import FALSE_ALARMS_PER_JOB_DAY
from warpwatch_telemetry.sections import REAL, AnomalyKind, NotNegative, Positive, Section

Budget = Annotated[float, Field(gt=0, le=100), REAL]


class HangConfig(Section):
    """No step for longer than anything that the job has shown.

    timeout_s: a first checkpoint may take two minutes. warmup_timeout_s: the same for a rank's
    first steps, compilation takes minutes. stopped_after_s: how long a living process may miss its
    heartbeat, which comes several times a second.
    """

    timeout_s: Positive = 140.0
    warmup_timeout_s: NotNegative = 600.0
    stopped_after_s: Positive = 10.0


class XidConfig(Section):
    """``min_severity``: XIDs of severity info, as of a program that was killed, need no one.

    ``ignored``: numbers that are never raised.
    """

    min_severity: Literal["info", "warning", "critical"] = "warning"
    ignored: tuple[int, ...] = ()


class DeviceIdleConfig(Section):
    """``after_s``: in use and idle; longer than checkpoints and evaluations on the CPU take."""

    after_s: Positive = 600.0


class DetectionConfig(Section):
    """Settings of all kinds, then a section for each kind that has more.

    ``false_alarms_per_job_day``: the limits of the kinds that evaluate noise follow from it
    (budget.py). ``disabled``: the kinds that are switched off.
    """

    false_alarms_per_job_day: Budget = FALSE_ALARMS_PER_JOB_DAY
    disabled: tuple[AnomalyKind, ...] = ()
    hang: HangConfig = HangConfig()
    xid: XidConfig = XidConfig()
    device_idle: DeviceIdleConfig = DeviceIdleConfig()


class AnomaliesConfig(Section):
    """How long an anomaly lives.

    ``hold_s``: how long an event (crash, oom, xid, …) stays active after its last one; long enough
    that a page in the night still finds it. ``reopen_s``: an anomaly that returns
    this soon after its end is the same anomaly; twice a usual scrape and alert interval of 60 s.
    """

    hold_s: NotNegative = 600.0
    reopen_s: NotNegative = 120.0
