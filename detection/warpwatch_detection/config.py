"""The sections `detection` (one a kind) and `anomalies`."""

from __future__ import annotations

from warpwatch_detection.config_devices import (
    ClockDropConfig,
    DeviceIdleConfig,
    DeviceLostConfig,
    DeviceStuckConfig,
    EccUncorrectableConfig,
    NvlinkErrorConfig,
    OverheatingConfig,
    PcieDegradedConfig,
    RowRemapConfig,
    ThrottleConfig,
    XidConfig,
)
from warpwatch_detection.config_life import (
    CrashConfig,
    HangConfig,
    MemoryLeakConfig,
    MemoryPressureConfig,
    OomConfig,
)
from warpwatch_detection.config_ranks import DataStallConfig, GcPauseConfig, StragglerConfig
from warpwatch_detection.config_steps import (
    CommSlowConfig,
    StepDriftConfig,
    StepRegressionConfig,
    StepSpikesConfig,
)
from warpwatch_telemetry.sections import Age, NotNegative, Section


class DetectionConfig(Section):
    """One section a kind."""

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
    oom: OomConfig = OomConfig()
    crash: CrashConfig = CrashConfig()
    device_lost: DeviceLostConfig = DeviceLostConfig()
    device_stuck: DeviceStuckConfig = DeviceStuckConfig()
    xid: XidConfig = XidConfig()
    ecc_uncorrectable: EccUncorrectableConfig = EccUncorrectableConfig()
    row_remap: RowRemapConfig = RowRemapConfig()
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
