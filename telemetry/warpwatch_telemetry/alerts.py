"""What may become of an alert that a webhook brings: a closed set."""

from __future__ import annotations

from warpwatch_telemetry.captures import OUTCOMES

CAPTURED = "captured"
# The anomaly that the alert tells of has been captured already.
ALREADY_CAPTURED = "already_captured"
# This firing of the alert has been answered with a capture before.
DUPLICATE = "duplicate"
RESOLVED = "resolved"
# It names nothing that could be captured.
IGNORED = "ignored"
BAD_LABELS = "bad_labels"
NO_RANK = "no_rank"
# The kind's recipe is switched off.
NO_RECIPE = "no_recipe"
# One webhook brought more than are looked at.
TOO_MANY = "too_many"

ALERT_OUTCOMES = (
    CAPTURED,
    ALREADY_CAPTURED,
    DUPLICATE,
    RESOLVED,
    IGNORED,
    BAD_LABELS,
    NO_RANK,
    NO_RECIPE,
    TOO_MANY,
    "failed",
    *(outcome for outcome in OUTCOMES if outcome.startswith("refused_")),
)
