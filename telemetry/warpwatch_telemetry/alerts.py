"""What may become of an alert that a webhook brings: a closed set."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

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


class NotReadyError(Exception):
    """Which ranks run here is not known yet. In one line."""


@dataclass(frozen=True, slots=True)
class AlertAnswer:
    """What became of one alert."""

    fingerprint: str
    outcome: Annotated[str, Field(json_schema_extra={"enum": list(ALERT_OUTCOMES)})]
    detail: str = ""
    capture_id: str | None = None


# Alertmanager's fingerprints have 16 characters, its times some 30.
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
        """Of this firing of the alert: every repetition of the notification has the same."""
        return f"{self.fingerprint}@{self.starts_at}"

    @property
    def name(self) -> str:
        """In one line."""
        return " ".join(self.labels.get("alertname", "").split())[:100]


def host_of(instance: str) -> str:
    """The host of ``host:port`` as Prometheus writes its label ``instance``, as ``plain``."""
    host, colon, port = instance.rpartition(":")
    return plain((host if colon and port.isdecimal() else instance).strip("[]"))


def plain(host: str) -> str:
    """The one spelling of a host: IPv4 also where IPv6 wraps it, the shortest IPv6, lower case."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host.lower()
    return str(getattr(address, "ipv4_mapped", None) or address)
