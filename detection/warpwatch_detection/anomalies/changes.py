"""What happens to an anomaly."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from warpwatch_telemetry.anomalies import Anomaly


@dataclass(frozen=True, slots=True)
class Change:
    """``anomaly``: as it is after the change. reopened: it came back soon after its end."""

    what: Literal["opened", "reopened", "updated", "closed"]
    anomaly: Anomaly
