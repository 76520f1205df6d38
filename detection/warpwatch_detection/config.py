"""The sections `detection` and `anomalies` of the configuration."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from warpwatch_detection.detector import FALSE_ALARMS_PER_JOB_DAY
from warpwatch_telemetry.sections import REAL, AnomalyKind, NotNegative, Positive, Section

Budget = Annotated[float, Field(gt=0, le=100), REAL]


class HangConfig(Section):
    """The least times without a step that are a hang.

    timeout_s: longer than a first checkpoint, which may take two minutes. warmup_timeout_s: the
    same for a rank's first steps, because compilation takes minutes. stopped_after_s: how long a
    live process may miss its heartbeat, which comes several times per second.
    """

    timeout_s: Positive = 140.0
    warmup_timeout_s: NotNegative = 600.0
    stopped_after_s: Positive = 10.0


class XidConfig(Section):
    """The XIDs that are found.

    min_severity: XIDs of severity info, such as that of a killed program, need no action.
    ignored: XIDs that are never found.
    """

    min_severity: Literal["info", "warning", "critical"] = "warning"
    ignored: tuple[int, ...] = ()


class DeviceIdleConfig(Section):
    """The idle time of a device in use that is a fault; evaluations on the CPU take less."""

    after_s: Positive = 600.0


class DetectionConfig(Section):
    """The settings of all kinds, then a section for each kind that has more.

    false_alarms_per_job_day: the budget from which limits follow, for kinds that evaluate noise.
    disabled: the kinds that are switched off.
    """

    false_alarms_per_job_day: Budget = FALSE_ALARMS_PER_JOB_DAY
    disabled: tuple[AnomalyKind, ...] = ()
    hang: HangConfig = HangConfig()
    xid: XidConfig = XidConfig()
    device_idle: DeviceIdleConfig = DeviceIdleConfig()


class AnomaliesConfig(Section):
    """How long an anomaly lives.

    hold_s: how long an event (crash, oom, xid, …) stays active after its last one, so that an
    operator who is paged at night still finds it. reopen_s: an anomaly that returns this soon after
    its end is the same anomaly; twice a usual scrape and alert interval of 60 s.
    """

    hold_s: NotNegative = 600.0
    reopen_s: NotNegative = 120.0
