"""A rank that ended with an exception, or died while others lived on."""

from __future__ import annotations

from warpwatch_detection.detectors.deaths import DeathDetector


class Crash(DeathDetector):
    """One anomaly a job: the first rank is the cause, ranks that follow are its consequence."""

    kind = "crash"
