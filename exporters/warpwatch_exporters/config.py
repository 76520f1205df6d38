"""The section `exporters`: which ways out are open, and where they lead."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from warpwatch_telemetry.anomalies import Severity
from warpwatch_telemetry.catalogue import Profile
from warpwatch_telemetry.sections import Boolean, Interval, Section, Url


class PrometheusConfig(Section):
    """``dcgm_names``: the names of dcgm-exporter's default list as well.

    ``profile``: about 30 series a GPU, 90, or all, which has fine buckets of step durations too.
    """

    dcgm_names: Boolean = False
    profile: Profile = "default"
    workload_labels: Literal["join", "inline"] = "join"


class JsonlConfig(Section):
    path: Path | None = None


class OtlpConfig(Section):
    """The exporter to an OpenTelemetry collector.

    ``endpoint``: its OTLP/HTTP address, without /v1/…; ``interval_s``: the interval of metrics, as
    events are sent at once. ``headers_file``: headers of every request, as ``Name: value``, one per
    line.
    """

    endpoint: Url | None = None
    headers_file: Path | None = None
    interval_s: Interval = 60.0


class WebhookConfig(Section):
    """Where messages go: ``url``, or the file that holds it where it is a secret, as Slack's is."""

    url: Url | None = None
    url_file: Path | None = None
    format: Literal["json", "slack"] = "json"
    min_severity: Severity = "warning"
    headers_file: Path | None = None
    ca_file: Path | None = None

    @model_validator(mode="after")
    def _goes_somewhere(self) -> WebhookConfig:
        if (self.url is None) == (self.url_file is None):
            raise ValueError("either url or url_file is needed")
        return self


class ExportersConfig(Section):
    prometheus: PrometheusConfig = PrometheusConfig()
    jsonl: JsonlConfig = JsonlConfig()
    otlp: OtlpConfig = OtlpConfig()
    webhooks: Annotated[tuple[WebhookConfig, ...], Field(max_length=16)] = ()
