"""A lasting level shift of the job's step time that no single rank and no input wait explains."""

from __future__ import annotations

import math

from warpwatch_detection.detector import JobStep
from warpwatch_detection.detectors.shift_detector import ShiftDetector, ShiftJob
from warpwatch_detection.signals.rise import Rise
from warpwatch_telemetry.anomalies import Detected


class StepRegression(ShiftDetector):
    """Judges the log of the common time: a shift is a ratio."""

    kind = "step_regression"
    judged = "level of the steps"

    def share(self, difference: float) -> float:
        # A limit learned from few values has no bound.
        return math.expm1(min(difference, 10.0))

    def sample(self, job: ShiftJob, seen: JobStep) -> float | None:
        return job.signal.add(seen, seen.common_s)

    def found(self, job: ShiftJob, rise: Rise, level: float, seen: JobStep) -> Detected:
        value_s, baseline_s = math.exp(level), math.exp(rise.baseline)
        return seen.found(
            begin_step=rise.begin_step,
            value=value_s,
            baseline=baseline_s,
            summary=f"steps take {100 * (value_s / baseline_s - 1):.0f} % longer since step "
            f"{rise.begin_step}: {value_s:.3g} s instead of {baseline_s:.3g} s",
        )
