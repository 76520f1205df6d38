"""What the training thread notes where a step or a phase begins or ends: entries of a log."""

from __future__ import annotations

from typing import Any

from warpwatch.ring import DURATION

# Until a step's end, the place of its duration holds the time spent in no phase.
OTHER = DURATION
# What happened; what is none of these is the index of the phase that is entered. NEXT: a step ends,
# and the next one begins.
LEAVE, SWITCH, BEGIN, NEXT, END, START = -1, -2, -3, -4, -5, -6
# What happened, when (monotonic, ns), and a detail. At NEXT and END: flags, samples and tokens of
# the step. Elsewhere the phase that runs between phases from now on, None where that stays as it
# is. On a GPU the detail is a pair: that, and the event recorded at the border.
Entry = tuple[int, int, Any]
