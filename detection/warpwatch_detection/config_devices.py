"""`detectors`: the sections of the kinds about a device. Where a default has a source, it is named.

Seconds, Celsius and ratios. ``clear_s``: how long it must be well for an anomaly to be over.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from warpwatch_telemetry.sections import (
    REAL,
    AtLeastOne,
    DetectorConfig,
    NotNegative,
    Positive,
    PositiveShare,
    Share,
)


class DeviceLostConfig(DetectorConfig):
    """``hold_s``: the driver says that it is gone; two statuses, as one may be a mistake.

    ``unreadable_s``, ``silent_s``: it cannot be read without a known reason, or gives no reading,
    while others do; longer than a driver takes to initialise a GPU (up to 32 s were seen).
    ``forget_s``: a GPU that gives no reading may have been removed on purpose; in a day somebody
    has seen it.
    """

    hold_s: NotNegative = 2.0
    unreadable_s: Positive = 45.0
    silent_s: Positive = 45.0
    forget_s: Positive = 86400.0
    clear_s: NotNegative = 5.0


class DeviceStuckConfig(DetectorConfig):
    """The watchdog has waited ``sources.nvml.stuck_after_s`` before it says so: told at once."""

    clear_s: NotNegative = 5.0


class XidConfig(DetectorConfig):
    """``min_severity``: XIDs of severity info, as of a program that was killed, need nobody.

    ``ignored``: numbers that are never told.
    """

    min_severity: Literal["info", "warning", "critical"] = "warning"
    ignored: tuple[int, ...] = ()


class EccUncorrectableConfig(DetectorConfig):
    """Any new error is told: data was lost."""


class RowRemapConfig(DetectorConfig):
    """A remapping that waits for a reset, has failed, or took place is told."""


class ThrottleConfig(DetectorConfig):
    """A share of ``window_s`` in which clocks were held down.

    A tenth of half a minute: what costs a job some per cent, and no single short peak. It is over
    when the share has been below half of that for ``clear_s``.
    """

    window_s: Annotated[float, Field(ge=1, le=3600), REAL] = 30.0
    min_share: PositiveShare = 0.10
    clear_s: NotNegative = 30.0


class OverheatingConfig(DetectorConfig):
    """Within ``margin_celsius`` of the temperature at which the device slows down.

    Healthy GPUs under full load keep 10 °C and more. It is over ``release_celsius`` further down.
    """

    margin_celsius: Positive = 4.0
    release_celsius: Positive = 3.0
    hold_s: NotNegative = 60.0
    clear_s: NotNegative = 30.0


class ClockDropConfig(DetectorConfig):
    """The SM clock under load against what this device has had; means of ``block_s`` seconds.

    ``min_drop``: load moves the clock of a healthy GPU by 5 to 10 %. ``min_utilization``: below it
    the driver lowers clocks by itself. Known from ``ready_blocks`` on.
    """

    min_drop: Annotated[float, Field(gt=0, lt=1), REAL] = 0.15
    min_utilization: PositiveShare = 0.5
    block_s: Annotated[float, Field(ge=1, le=600), REAL] = 20.0
    ready_blocks: AtLeastOne = 4
    hold_s: NotNegative = 40.0
    clear_s: NotNegative = 20.0


class PcieDegradedConfig(DetectorConfig):
    """A link below its maximum during ``hold_s`` of load: it is read every 30 s, and an idle one
    saves power by its generation. ``replays_per_minute``: the most that NVIDIA finds normal
    (DCGM's health check)."""

    min_utilization: PositiveShare = 0.2
    hold_s: NotNegative = 90.0
    replays_per_minute: Positive = 8.0
    clear_s: NotNegative = 30.0


class NvlinkErrorConfig(DetectorConfig):
    """DCGM's health check: any replay or recovery, CRC errors from 100 a second on.

    ``quiet_s``: how long no further one may come for it to be over. ``down_s``: how long a link
    that was up must be down.
    """

    crc_per_second: Positive = 100.0
    quiet_s: Annotated[float, Field(ge=1, le=86400), REAL] = 600.0
    down_s: NotNegative = 10.0
    clear_s: NotNegative = 10.0


class DeviceIdleConfig(DetectorConfig):
    """In use and idle for ``after_s``: longer than checkpoints and evaluations on the CPU take.

    ``max_utilization``: what a desktop or a monitor causes. ``min_memory_share``: more than the
    contexts of processes that do nothing take. ``clear_s``: a lone kernel is no work.
    """

    after_s: Positive = 600.0
    max_utilization: Share = 0.02
    min_memory_share: PositiveShare = 0.05
    clear_s: NotNegative = 10.0
