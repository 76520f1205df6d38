"""`detectors`: the kinds that are about single ranks. Reasons and sources: docs/detection.md."""

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

Blocks = Annotated[int, Field(ge=2, le=100), WHOLE]
Ratio = Annotated[float, Field(gt=1), REAL]


class StragglerConfig(DetectorConfig):
    """Ratio of a rank's compute to its peers' median, against the rank's own ratio in health.

    warmup_steps: compilation and first batches; the slow first steps of MLPerf runs are 5.
    tick_s, window_ticks: the level is the median of 20 ticks of a step or 0.1 s, the longer: a
    scheduler's slices of some milliseconds weigh much in short steps.
    baseline_blocks, ready_blocks: windows that the baseline is made of, and that suffice to begin.
    min_ratio: what Greyhound calls slow; drift_ratio: over ``drift_blocks`` windows, above the 5 %
    by which healthy GPUs differ. noise_factor: four standard deviations of past windows.
    quartile_ratio: in a quarter of the steps; that costs them together 5 %.
    hold_ticks, hold_s: how long the level must stay; hold_s is shorter in proportion to how far
    above the limit it is. Slow seconds of busy cores are the operating system's.
    min_cost: share of the step, below which nobody would act.
    start_ratio: of a rank slow from the start; stage_ratio parts groups that do other work.
    """

    warmup_steps: Count = 20
    tick_s: NotNegative = 0.1
    window_ticks: Annotated[int, Field(ge=5, le=200), WHOLE] = 20
    baseline_blocks: Blocks = 20
    ready_blocks: Blocks = 5
    min_ratio: Ratio = 1.10
    drift_ratio: Ratio = 1.06
    drift_blocks: Blocks = 5
    quartile_ratio: Ratio = 1.20
    noise_factor: Positive = 4.0
    hold_ticks: AtLeastOne = 5
    hold_s: NotNegative = 4.0
    min_cost: PositiveShare = 0.03
    start_ratio: Ratio = 1.25
    stage_ratio: Ratio = 1.10


class DataStallConfig(DetectorConfig):
    """Share of the time spent in ``data_wait``; a wait counts as one step at most.

    warmup_steps: loaders fill their queues. block_steps, block_s: a block lasts both.
    baseline_blocks, ready_blocks: blocks that the baseline is made of, and that suffice to begin.
    long_blocks: here ``min_share`` (TraceML warns at 10 %) and ``min_rise`` over the baseline
    count; short_blocks: here ``short_share``, which takes five late steps of thirty.
    noise_factor: four standard deviations of past blocks.
    start_share: a quarter of the time lost is a stall, also if it was never otherwise.
    """

    warmup_steps: Count = 20
    block_steps: Annotated[int, Field(ge=3, le=100), WHOLE] = 10
    block_s: Annotated[float, Field(ge=0, le=60), REAL] = 1.0
    baseline_blocks: Blocks = 40
    ready_blocks: Blocks = 5
    short_blocks: Blocks = 3
    long_blocks: Blocks = 8
    min_share: Share = 0.10
    min_rise: PositiveShare = 0.08
    short_share: PositiveShare = 0.15
    noise_factor: Positive = 4.0
    start_share: PositiveShare = 0.25


class GcPauseConfig(DetectorConfig):
    """Pauses of the garbage collector: told by the shim, or seen as a rank's regular slow steps.

    warmup_steps: imports and compilation collect much. min_share: of the time, told pauses; 1 %
    is what a diagnosis calls costly. window_s, window_steps: the time over which they count.
    min_pauses: one or two show no habit.
    min_ratio, noise_factor: a slow step is this much above the rank's usual ratio to its peers.
    min_period_steps, max_period_steps: shorter is a slow rank; longer is what checkpoints and
    evaluations take. max_pause_s: a full collection of some ten million objects.
    """

    warmup_steps: Count = 20
    min_share: PositiveShare = 0.01
    window_s: Positive = 60.0
    window_steps: AtLeastOne = 150
    min_pauses: Annotated[int, Field(ge=3, le=20), WHOLE] = 4
    min_ratio: Ratio = 1.08
    noise_factor: Positive = 6.0
    min_period_steps: Annotated[int, Field(ge=2), WHOLE] = 5
    max_period_steps: Annotated[int, Field(ge=10, le=1000), WHOLE] = 80
    max_pause_s: Positive = 5.0
