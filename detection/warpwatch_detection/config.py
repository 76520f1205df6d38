"""The sections `detection` (one a kind, and what they share) and `anomalies`.

Only what an operator can understand of a kind is a key; what tunes a detector is a constant beside
its algorithm.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from warpwatch_telemetry.sections import (
    REAL,
    Age,
    Count,
    DetectorConfig,
    NotNegative,
    Positive,
    PositiveShare,
    Section,
    Share,
)

# Enough for compilation and the first allocations of a plain loop, and for loaders to fill.
WARMUP_STEPS = 20

Effect = Annotated[float, Field(gt=0, le=10), REAL]
Ratio = Annotated[float, Field(gt=1, allow_inf_nan=False), REAL]


class StepRegressionConfig(DetectorConfig):
    """A level of the job's step time that rose.

    min_effect: 3 %, about the least that is worth a look; noise may demand more.
    accept_after_s: a new level that lasted so long is the new normal; 10 minutes is as long as an
    operator may take to look.
    """

    min_effect: Effect = 0.03
    accept_after_s: NotNegative = 600.0


class StepDriftConfig(DetectorConfig):
    """``min_effect``: 6 % against the level 400 samples ago, more than jobs settle by in that
    time."""

    min_effect: Effect = 0.06


class StepSpikesConfig(DetectorConfig):
    """Slow steps among normal ones, too many of them.

    min_spike: what makes a step slow; 15 %, beyond what scheduling of the operating system does.
    alarm_share: the share of slow steps that is worth an alarm, one in ten.
    """

    min_spike: Effect = 0.15
    alarm_share: PositiveShare = 0.1


class CommSlowConfig(DetectorConfig):
    """``min_rise``: of communication; 20 %, since a network that others use too wanders by 10 %."""

    min_rise: Effect = 0.2


class DataStallConfig(DetectorConfig):
    """``min_share``: of the time spent waiting for data; TraceML warns at 10 %."""

    min_share: Share = 0.10


class StragglerConfig(DetectorConfig):
    """A rank's compute against its peers', compared with the rank's own ratio in health.

    min_ratio: what Greyhound calls slow. hold_s: how long it must last, less in proportion to how
    far above the limit it is; slow seconds of busy cores are the operating system's.
    """

    min_ratio: Ratio = 1.10
    hold_s: NotNegative = 4.0


class GcPauseConfig(DetectorConfig):
    """``min_share``: of the time, in pauses; 1 % is what a diagnosis calls costly."""

    min_share: PositiveShare = 0.01


class HangConfig(DetectorConfig):
    """No step for longer than anything that the job has shown.

    timeout_s: a first checkpoint may take two minutes. warmup_timeout_s: the same for a rank's
    first steps, compilation takes minutes. stopped_after_s: how long a living process may miss its
    heartbeat, which comes several times a second.
    """

    timeout_s: Positive = 140.0
    warmup_timeout_s: NotNegative = 600.0
    stopped_after_s: Positive = 10.0


class MemoryLeakConfig(DetectorConfig):
    """Memory that grows and never settles.

    min_growth_bytes: within 600 steps; two segments of 20 MB of PyTorch's allocator and some.
    """

    min_growth_bytes: NotNegative = 64e6


class MemoryPressureConfig(DetectorConfig):
    """``device_share``, ``host_share``: of the device's memory, and of what the control group or
    host allows, in use; above 97 % and 95 % hardly an allocation of usual size fits."""

    device_share: PositiveShare = 0.97
    host_share: PositiveShare = 0.95


class DeviceLostConfig(DetectorConfig):
    """``silent_s``: it gives no reading, or none without a known reason, while others do; longer
    than a driver takes to initialise a GPU (up to 32 s were seen)."""

    silent_s: Positive = 45.0


class XidConfig(DetectorConfig):
    """``min_severity``: XIDs of severity info, as of a program that was killed, need no one.

    ``ignored``: numbers that are never raised.
    """

    min_severity: Literal["info", "warning", "critical"] = "warning"
    ignored: tuple[int, ...] = ()


class ThrottleConfig(DetectorConfig):
    """``min_share``: of half a minute in which clocks were held down; a tenth costs a job some per
    cent, and no single short peak counts."""

    min_share: PositiveShare = 0.10


class OverheatingConfig(DetectorConfig):
    """``margin_celsius``: how near to the temperature at which the device slows down; healthy GPUs
    under full load keep 10 °C and more."""

    margin_celsius: Positive = 4.0


class ClockDropConfig(DetectorConfig):
    """``min_drop``: of the SM clock under load against what this device has had; load moves the
    clock of a healthy GPU by 5 to 10 %."""

    min_drop: Annotated[float, Field(gt=0, lt=1), REAL] = 0.15


class PcieDegradedConfig(DetectorConfig):
    """``replays_per_minute``: the most that NVIDIA finds normal (DCGM's health check)."""

    replays_per_minute: Positive = 8.0


class NvlinkErrorConfig(DetectorConfig):
    """``crc_per_second``: where DCGM's health check warns."""

    crc_per_second: Positive = 100.0


class DeviceIdleConfig(DetectorConfig):
    """``after_s``: in use and idle; longer than checkpoints and evaluations on the CPU take."""

    after_s: Positive = 600.0


class DetectionConfig(Section):
    """``warmup_steps``: steps after a job's start that are not judged; then one section a kind."""

    warmup_steps: Count = WARMUP_STEPS
    step_regression: StepRegressionConfig = StepRegressionConfig()
    step_drift: StepDriftConfig = StepDriftConfig()
    step_spikes: StepSpikesConfig = StepSpikesConfig()
    comm_slow: CommSlowConfig = CommSlowConfig()
    data_stall: DataStallConfig = DataStallConfig()
    straggler: StragglerConfig = StragglerConfig()
    gc_pause: GcPauseConfig = GcPauseConfig()
    hang: HangConfig = HangConfig()
    memory_leak: MemoryLeakConfig = MemoryLeakConfig()
    memory_pressure: MemoryPressureConfig = MemoryPressureConfig()
    oom: DetectorConfig = DetectorConfig()
    crash: DetectorConfig = DetectorConfig()
    device_lost: DeviceLostConfig = DeviceLostConfig()
    device_stuck: DetectorConfig = DetectorConfig()
    xid: XidConfig = XidConfig()
    ecc_uncorrectable: DetectorConfig = DetectorConfig()
    row_remap: DetectorConfig = DetectorConfig()
    thermal_throttle: ThrottleConfig = ThrottleConfig()
    power_brake: ThrottleConfig = ThrottleConfig()
    overheating: OverheatingConfig = OverheatingConfig()
    clock_drop: ClockDropConfig = ClockDropConfig()
    pcie_degraded: PcieDegradedConfig = PcieDegradedConfig()
    nvlink_error: NvlinkErrorConfig = NvlinkErrorConfig()
    device_idle: DeviceIdleConfig = DeviceIdleConfig()


class AnomaliesConfig(Section):
    """How long an anomaly lives.

    ``hold_s``: how long an event (crash, oom, xid, …) stays active after its last one; long enough
    that a page in the night still finds it. ``reopen_s``: what comes back so soon after its end is
    the same anomaly; twice a usual scrape and alert interval of 60 s. ``max_age``: of the stored
    anomalies; a month, for comparing with.
    """

    hold_s: NotNegative = 600.0
    reopen_s: NotNegative = 120.0
    max_age: Age = 30 * 86400.0
