"""Communication that takes longer on every rank while compute does not."""

from __future__ import annotations

import math

from warpwatch_detection.detector import JobStep
from warpwatch_detection.detectors.shift_detector import ShiftDetector, ShiftJob
from warpwatch_detection.signals.level_shift import LEAST_EFFECT, Shift
from warpwatch_detection.signals.rise import Rise
from warpwatch_detection.signals.signal_history import REFERENCE, level
from warpwatch_telemetry.anomalies import Detected

# Networks that others use too wander by 10 %.
MIN_RISE = 0.2
# Below 2 % of the step, communication cannot be what slows a job.
MIN_COMM = 0.02
# Compute that rises by half as much or more is a job that changed altogether.
MAX_COMPUTE = 0.5


class CommSlow(ShiftDetector):
    """Judges the smallest comm of any rank, in shares of what the job computed after warm-up.

    The rank that is last waits for no one, so its comm is what communication itself costs.
    ``job.beside``: log of the compute of the same samples. ``job.typical_s``: that after warm-up.
    """

    kind = "comm_slow"
    judged = "communication, in shares of the step,"

    def sample(self, job: ShiftJob, seen: JobStep) -> float | None:
        comm_s = min(seen.comm_s.values(), default=0.0)
        compute_s = seen.common_s - comm_s
        if comm_s <= 0 or compute_s <= 0:
            return None
        log_compute = job.signal.add(seen, compute_s)
        if log_compute is None:
            return None
        if not job.typical_s:
            job.typical_s = job.signal.sample_s / job.signal.group
        job.beside.append(log_compute)
        return comm_s / job.typical_s

    def confirms(self, job: ShiftJob, shift: Shift) -> bool:
        if shift.before < MIN_COMM:
            return shift.difference >= MIN_COMM + LEAST_EFFECT
        rise = shift.difference / shift.before
        older = job.beside[-shift.window - REFERENCE : -shift.window]
        newer = job.beside[-shift.window :]
        compute_rise = level(newer) - level(older)
        return rise >= MIN_RISE and compute_rise < MAX_COMPUTE * math.log1p(rise)

    def found(self, job: ShiftJob, rise: Rise, level: float, seen: JobStep) -> Detected:
        value_s, baseline_s = level * job.typical_s, rise.baseline * job.typical_s
        return seen.found(
            begin_step=rise.begin_step,
            value=value_s,
            baseline=baseline_s,
            summary=f"communication takes {value_s:.3g} s of a step on all ranks since step "
            f"{rise.begin_step} instead of {baseline_s:.3g} s, compute does not",
        )
