"""A rank that ran out of memory: on its device, or of the host so that the kernel killed it."""

from __future__ import annotations

from warpwatch_detection.config_life import OomConfig
from warpwatch_detection.detectors.deaths import DeathDetector


class Oom(DeathDetector):
    """A death of this cause is no `crash` beside it: both see the same causes."""

    kind = "oom"

    def __init__(self, config: OomConfig) -> None:
        super().__init__(config.grace_s)
