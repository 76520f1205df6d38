"""A rise that was found: until when it lasts."""

from __future__ import annotations

from dataclasses import dataclass

# Samples whose level says whether a rise is over.
CLOSING_SAMPLES = 20
# It is over below half of the rise: far from where it was found, so that it does not flap.
CLOSING_SHARE = 0.5
# A level that has lasted for so many samples, and for long enough, is the new normal.
ACCEPT_SAMPLES = 300


@dataclass(slots=True)
class Rise:
    """From ``baseline`` by ``size``, in the signal's own unit; ``time``: when it was found."""

    time: float
    begin_step: int
    baseline: float
    size: float
    samples: int = 0

    def is_over(self, level: float) -> bool:
        """``level``: of the newest CLOSING_SAMPLES."""
        enough = self.samples >= CLOSING_SAMPLES
        return enough and level < self.baseline + CLOSING_SHARE * self.size

    def is_accepted(self, now: float, after_s: float) -> bool:
        return self.samples >= ACCEPT_SAMPLES and now - self.time >= after_s
