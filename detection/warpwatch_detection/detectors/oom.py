"""A rank that ran out of memory: on its device, or of the host so that the kernel killed it."""

from __future__ import annotations

from warpwatch_detection.detectors.deaths import DeathDetector


class Oom(DeathDetector):
    """A death of this cause is no `crash` beside it."""

    kind = "oom"
