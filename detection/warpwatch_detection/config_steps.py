"""Sections of the kinds that judge the steps of a whole job."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from warpwatch_telemetry.sections import (
    REAL,
    AtLeastOne,
    Count,
    DetectorConfig,
    NotNegative,
    PositiveShare,
)

Effect = Annotated[float, Field(gt=0, le=10), REAL]


class StepSignalConfig(DetectorConfig):
    """What is left out of a job's steps before they are judged.

    warmup_steps: 20, enough for compilation and the first allocations of a plain loop.
    settle_steps: a start that is not stable after 200 more steps is taken as it is.
    sample_s: steps shorter than 0.1 s are judged by groups of about so long: scheduling of the
    operating system costs milliseconds, which are nothing in a tenth of a second.
    """

    warmup_steps: Count = 20
    settle_steps: Count = 200
    sample_s: NotNegative = 0.1


class RiseConfig(StepSignalConfig):
    """A level that rose for good.

    alarm_rate: false alarms a step and window that normal noise may raise.
    accept_after_s, accept_samples: a new level that lasted so long is the new normal; 10 minutes
    is as long as an operator may take to look.
    """

    alarm_rate: Annotated[float, Field(gt=0, lt=1e-3), REAL] = 4e-6
    accept_after_s: NotNegative = 600.0
    accept_samples: AtLeastOne = 300


class ShiftConfig(RiseConfig):
    """A lasting level shift, sought in windows of several lengths at once.

    min_effect: 3 %, about the least that is worth a look; noise may demand more.
    cost_steps: on top of that it must have cost two thirds of a step, so that the short and small
    humps after a checkpoint or an evaluation do not count: 8 % in 12 steps, 6 % in 24, 4 % in 60.
    block_s: the shortest span that is judged.
    peak_factor: a shift is larger than every excursion of the past that went away by itself.
    """

    min_effect: Effect = 0.03
    cost_steps: NotNegative = 0.65
    block_s: NotNegative = 1.0
    peak_factor: Annotated[float, Field(ge=1), REAL] = 1.1


class StepRegressionConfig(ShiftConfig):
    """Rises of the job's common time, relative to it."""


class CommSlowConfig(ShiftConfig):
    """Rises of communication, in shares of the step.

    min_rise: of communication itself: 20 %, since a network that others use too wanders by 10 %.
    min_comm: below 2 % of the step, communication cannot be what slows a job.
    max_compute: compute that rises by half as much or more is a job that changed altogether.
    """

    min_rise: Effect = 0.2
    min_comm: PositiveShare = 0.02
    max_compute: PositiveShare = 0.5


class StepDriftConfig(RiseConfig):
    """A rise too slow for a level shift.

    min_effect: 6 % against the level 400 samples ago, more than jobs settle by in that time.
    anchor_effect: 10 % against the level after warm-up, however long it took.
    """

    min_effect: Effect = 0.06
    anchor_effect: Effect = 0.10


class StepSpikesConfig(StepSignalConfig):
    """Slow steps among normal ones, too many of them.

    min_spike, min_spike_s: what makes a step slow: 15 % and 20 ms, beyond what scheduling of the
    operating system does.
    noise_factor: and 3.5 standard deviations, 1 in 4,000 steps of normal noise.
    alarm_share: the share of slow steps that is worth an alarm, one in ten.
    evidence: log of the likelihood ratio against the job's own rate at which it is told; 10 is
    e^10 = 22,000 to 1.
    """

    min_spike: Effect = 0.15
    min_spike_s: NotNegative = 0.02
    noise_factor: Annotated[float, Field(gt=0), REAL] = 3.5
    alarm_share: PositiveShare = 0.1
    evidence: Annotated[float, Field(gt=0), REAL] = 10.0
