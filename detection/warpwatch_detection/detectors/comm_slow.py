"""Communication that takes longer on every rank while compute does not."""

from __future__ import annotations

import math

from warpwatch_detection.config_steps import CommSlowConfig
from warpwatch_detection.detector import JobStep
from warpwatch_detection.detectors.shift_detector import ShiftDetector, ShiftJob
from warpwatch_detection.signals.level_shift import Shift
from warpwatch_detection.signals.rise import Rise
from warpwatch_detection.signals.signal_history import REFERENCE, level
from warpwatch_telemetry.anomalies import Found


class CommSlow(ShiftDetector[CommSlowConfig]):
    """Judges the smallest comm of any rank, in shares of what the job computed after warm-up.

    The rank that is last waits for nobody, so its comm is what communication itself costs.
    ``job.beside``: log of the compute of the same samples. ``job.typical``: seconds of that.
    """

    kind = "comm_slow"

    def sample(self, job: ShiftJob, seen: JobStep) -> bool:
        comm_s = min(seen.comm_s.values(), default=0.0)
        compute_s = seen.common_s - comm_s
        if comm_s <= 0 or compute_s <= 0:
            return False
        log_compute = job.signal.add(seen, compute_s, self._config)
        if log_compute is None:
            return False
        if not job.typical:
            job.typical = job.signal.sample_s / job.signal.group
        job.beside.append(log_compute)
        job.shifts.samples.add(comm_s / job.typical)
        return True

    def confirms(self, job: ShiftJob, shift: Shift) -> bool:
        config = self._config
        if shift.before < config.min_comm:
            return shift.difference >= config.min_comm + config.min_effect
        rise = shift.difference / shift.before
        older = job.beside[-shift.window - REFERENCE : -shift.window]
        newer = job.beside[-shift.window :]
        compute_rise = level(newer, shift.window) - level(older, shift.window)
        return rise >= config.min_rise and compute_rise < config.max_compute * math.log1p(rise)

    def found(self, job: ShiftJob, rise: Rise, level: float, seen: JobStep) -> Found:
        value_s, baseline_s = level * job.typical, rise.baseline * job.typical
        begin = rise.begin_step
        return Found(
            time=seen.time,
            severity="warning",
            job=seen.job,
            step=seen.step,
            begin_step=begin,
            value=value_s,
            baseline=baseline_s,
            summary=f"communication takes {value_s:.3g} s of a step on all ranks since step "
            f"{begin} instead of {baseline_s:.3g} s, compute does not",
        )
