"""Alertmanager's webhook as it arrives, version 4; Grafana's says more, which is passed over.

The format: https://prometheus.io/docs/alerting/latest/configuration/#webhook_config
"""

from __future__ import annotations

import hashlib
import ipaddress
import json
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

PATH = "/api/v1/alertmanager"
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


class Webhook(BaseModel):
    """A notification, each alert with a fingerprint; what is not named here is passed over."""

    alerts: list[Alert]

    @field_validator("alerts")
    @classmethod
    def _identified(cls, alerts: list[Alert]) -> list[Alert]:
        return [alert if alert.fingerprint else _with_fingerprint(alert) for alert in alerts]


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


def _with_fingerprint(alert: Alert) -> Alert:
    """Alertmanager before 0.19 sends none."""
    written = json.dumps(alert.labels, sort_keys=True).encode()
    fingerprint = hashlib.sha256(written).hexdigest()[:16]
    return alert.model_copy(update={"fingerprint": fingerprint})
