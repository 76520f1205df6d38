"""Alertmanager's webhook as it arrives, version 4; Grafana's says more, which is passed over.

The format: https://prometheus.io/docs/alerting/latest/configuration/#webhook_config
"""

from __future__ import annotations

import hashlib
import json

from pydantic import BaseModel, field_validator

from warpwatch_telemetry.alerts import Alert

PATH = "/api/v1/alertmanager"


class Webhook(BaseModel):
    """A notification, each alert with a fingerprint; what is not named here is passed over."""

    alerts: list[Alert]

    @field_validator("alerts")
    @classmethod
    def _identified(cls, alerts: list[Alert]) -> list[Alert]:
        return [alert if alert.fingerprint else _with_fingerprint(alert) for alert in alerts]


def _with_fingerprint(alert: Alert) -> Alert:
    """Alertmanager before 0.19 sends none."""
    written = json.dumps(alert.labels, sort_keys=True).encode()
    fingerprint = hashlib.sha256(written).hexdigest()[:16]
    return alert.model_copy(update={"fingerprint": fingerprint})
