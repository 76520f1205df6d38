"""`detectors`: memory, hangs and deaths."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from warpwatch_telemetry.sections import (
    REAL,
    WHOLE,
    AtLeastOne,
    Count,
    DetectorConfig,
    NotNegative,
    Positive,
    PositiveShare,
    Share,
)


class MemoryLeakConfig(DetectorConfig):
    """Growth over ``window_blocks`` medians of ``block_steps`` steps, in every part of them.

    warmup_steps: allocator and caches fill in the first steps. block_steps, window_blocks: a
    window of 600 steps, twice what caches that settle take. min_steps, min_s: what a window must
    span, so that neither few nor very fast steps decide. min_growth_bytes: two segments of 20 MB
    of PyTorch's allocator and some; min_growth_ratio: of the level; noise_factor: of the scatter
    about the line. min_part: least growth of a sixth of the window against an even share; min_late:
    least growth of its end against its begin, which tells a leak from a cache that fills.
    hold_blocks: two, so that ranks that leak alike are told together. critical_s: out of memory
    within two hours calls a person.
    """

    warmup_steps: Count = 20
    block_steps: Annotated[int, Field(ge=1, le=1000), WHOLE] = 25
    window_blocks: Annotated[int, Field(ge=12, le=48), WHOLE] = 24
    min_steps: AtLeastOne = 500
    min_s: NotNegative = 30.0
    min_growth_bytes: NotNegative = 64e6
    min_growth_ratio: Share = 0.005
    noise_factor: Positive = 5.0
    min_part: Share = 0.25
    min_late: Share = 0.7
    hold_blocks: AtLeastOne = 2
    critical_s: NotNegative = 7200.0


class MemoryPressureConfig(DetectorConfig):
    """Allocation retries, a device or a host that is nearly full for ``hold_s``.

    device_share: of the device's memory in use, if the allocator has not kept more than
    ``idle_reserve`` of what it reserved for no use at all; host_share: of the memory that the
    control group or the host allows. Above 97 % and 95 % hardly an allocation of usual size fits.
    release: how far it must fall to be over. hold_s: peaks within a step are no state. calm_s:
    without a further retry for so long, it is over. warmup_steps: the first steps try out how much
    fits.
    """

    device_share: PositiveShare = 0.97
    host_share: PositiveShare = 0.95
    release: Share = 0.02
    idle_reserve: Share = 0.10
    hold_s: NotNegative = 30.0
    calm_s: NotNegative = 300.0
    warmup_steps: Count = 20


class OomConfig(DetectorConfig):
    """``grace_s``: how long deaths are gathered before the first is named; as for `crash`."""

    grace_s: NotNegative = 5.0


class HangConfig(DetectorConfig):
    """No step for the longest of ``timeout_s``, ``median_steps`` steps and ``gap_factor`` gaps.

    timeout_s: a first checkpoint may take two minutes. median_steps: of slow steps nearly thirty.
    gap_factor: a checkpoint may take a little longer than the longest so far. warmup_steps,
    warmup_timeout_s: hold for a rank's first steps, compilation takes minutes. stopped_after_s: how
    long a living process may miss its heartbeat, which comes several times a second. rest_s: how
    long processes and devices must do nothing for a hang to be told before timeout_s; with what is
    read every 2 s it is told within 30 s. rest_cpu_ratio: processor time a second of a process that
    only waits (its watchdogs and heartbeat take less than 1 %); rest_io_bytes_per_s: what it reads
    and writes meanwhile. rest_device_ratio: utilization of a device that does nothing, and the use
    of memory of one that only spins in a collective; spin_power_ratio: power of such a one against
    the power in its steps.
    """

    timeout_s: Positive = 140.0
    median_steps: Positive = 28.0
    gap_factor: Annotated[float, Field(ge=1), REAL] = 1.15
    warmup_steps: Count = 5
    warmup_timeout_s: NotNegative = 600.0
    stopped_after_s: Positive = 10.0
    rest_s: Positive = 20.0
    rest_cpu_ratio: Share = 0.02
    rest_io_bytes_per_s: NotNegative = 20_000.0
    rest_device_ratio: Share = 0.02
    spin_power_ratio: Share = 0.6


class CrashConfig(DetectorConfig):
    """``grace_s``: how long others must live on for a death to be a crash of one rank."""

    grace_s: NotNegative = 5.0
