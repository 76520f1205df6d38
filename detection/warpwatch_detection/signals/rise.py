"""A rise that was told: until when it lasts."""

from __future__ import annotations

from dataclasses import dataclass

# Samples of which the level says whether a rise is over.
CLOSING_SAMPLES = 20
# It is over below half of the rise: far from where it was found, so that it does not flap.
CLOSING_SHARE = 0.5


@dataclass(slots=True)
class Rise:
    """Levels in the signal's own unit; ``time``: when it was told."""

    time: float
    begin_step: int
    baseline: float
    rise: float
    samples: int = 0

    def over(self, level: float) -> bool:
        """The level of the newest CLOSING_SAMPLES has returned."""
        enough = self.samples >= CLOSING_SAMPLES
        return enough and level < self.baseline + CLOSING_SHARE * self.rise

    def accepted(self, now: float, after_s: float, samples: int) -> bool:
        """It has lasted so long that it is the new normal."""
        return self.samples >= samples and now - self.time >= after_s
