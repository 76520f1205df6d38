"""The section `exporters`: which ways out are open, and where they lead."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from warpwatch_telemetry.profiles import Profile
from warpwatch_telemetry.sections import Boolean, Section, Url


class PrometheusConfig(Section):
    """``dcgm_names``: the names of dcgm-exporter's default list as well.

    ``profile``: about 30 series a GPU, 90, or all, which has fine buckets of step durations too.
    """

    dcgm_names: Boolean = False
    profile: Profile = "default"
    workload_labels: Literal["join", "inline"] = "join"


class JsonlConfig(Section):
    path: Path | None = None


class GrafanaConfig(Section):
    """Annotations; ``token_file``: of a service account that may write them.

    ``ca_file``: the system's authorities know a Grafana with a public certificate, no other.
    """

    url: Url | None = None
    token_file: Path | None = None
    ca_file: Path | None = None


class ExportersConfig(Section):
    prometheus: PrometheusConfig = PrometheusConfig()
    jsonl: JsonlConfig = JsonlConfig()
    grafana: GrafanaConfig = GrafanaConfig()
