"""A lasting level shift of the job's step time that no single rank and no input wait explains."""

from __future__ import annotations

import math

from warpwatch_detection.config_steps import StepRegressionConfig
from warpwatch_detection.detector import JobStep
from warpwatch_detection.detectors.shift_detector import ShiftDetector, ShiftJob
from warpwatch_detection.signals.level_shift import Shift
from warpwatch_detection.signals.rise import Rise
from warpwatch_detection.signals.step_signal import add_common
from warpwatch_telemetry.anomalies import Found


class StepRegression(ShiftDetector[StepRegressionConfig]):
    """Judges the log of the common time: a shift is a ratio."""

    kind = "step_regression"

    def sample(self, job: ShiftJob, seen: JobStep) -> bool:
        return add_common(job, seen, self._config) is not None

    def confirms(self, job: ShiftJob, shift: Shift) -> bool:
        return True

    def found(self, job: ShiftJob, rise: Rise, level: float, seen: JobStep) -> Found:
        value_s, baseline_s = math.exp(level), math.exp(rise.baseline)
        begin = rise.begin_step
        return Found(
            time=seen.time,
            severity="warning",
            job=seen.job,
            step=seen.step,
            begin_step=begin,
            value=value_s,
            baseline=baseline_s,
            summary=f"steps take {100 * (value_s / baseline_s - 1):.0f} % longer since step "
            f"{begin}: {value_s:.3g} s instead of {baseline_s:.3g} s",
        )
