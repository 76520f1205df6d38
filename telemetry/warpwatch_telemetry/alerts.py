"""Defines alerts of Alertmanager and their outcomes, a closed set."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from warpwatch_telemetry.captures import CAPTURED, NO_RECIPE, OUTCOMES

# The alert's anomaly has been captured already.
ALREADY_CAPTURED = "already_captured"
# This firing of the alert has had a capture before.
DUPLICATE = "duplicate"
RESOLVED = "resolved"
# It names nothing that could be captured.
IGNORED = "ignored"
BAD_LABELS = "bad_labels"
NO_RANK = "no_rank"
# One webhook has too many alerts.
TOO_MANY = "too_many"

ALERT_OUTCOMES = (
    CAPTURED, ALREADY_CAPTURED, DUPLICATE, RESOLVED, IGNORED, BAD_LABELS, NO_RANK, NO_RECIPE,
    TOO_MANY, "failed", *(outcome for outcome in OUTCOMES if outcome.startswith("refused_")),
)  # fmt: skip


class NotReadyError(Exception):
    """The ranks on this node are not known yet."""


@dataclass(frozen=True, slots=True)
class AlertAnswer:
    """The outcome of one alert."""

    fingerprint: str
    outcome: Annotated[str, Field(json_schema_extra={"enum": list(ALERT_OUTCOMES)})]
    detail: str = ""
    capture_id: str | None = None


# Alertmanager's fingerprints have 16 characters, its times about 30.
_Short = Annotated[str, Field(max_length=64)]


class Alert(BaseModel):
    """One alert of a notification. starts_at: as it is written, the same in every repetition."""

    model_config = ConfigDict(frozen=True, populate_by_name=True)

    status: Literal["firing", "resolved"]
    labels: dict[str, str]
    starts_at: Annotated[_Short, Field(alias="startsAt")]
    fingerprint: _Short = ""

    @property
    def key(self) -> str:
        """The key of this firing, the same in every repetition of the notification."""
        return f"{self.fingerprint}@{self.starts_at}"

    @property
    def name(self) -> str:
        """The alert's name in one line."""
        return " ".join(self.labels.get("alertname", "").split())[:100]


def host_of(instance: str) -> str:
    """Return the host of Prometheus' label ``instance``, as ``plain``."""
    host, colon, port = instance.rpartition(":")
    return plain((host if colon and port.isdecimal() else instance).strip("[]"))


def plain(host: str) -> str:
    """Return one spelling of a host: lower case, the shortest IPv6, wrapped IPv4 as IPv4."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host.lower()
    return str(getattr(address, "ipv4_mapped", None) or address)
