"""The configuration: typed, every default in one place, every key also an environment variable.

One YAML file, then ``WARPWATCH_SECTION__KEY`` on top. Unknown keys and bad values are refused
with the path, the value and the nearest valid key.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from warpwatch_daemon.config.conversion import NotConvertibleError, convert
from warpwatch_daemon.config.reading import check_listen, overlay, read_yaml
from warpwatch_daemon.config.triggers import AnomaliesConfig, TriggersConfig
from warpwatch_detection.config import DetectorsConfig
from warpwatch_telemetry.errors import UsageError
from warpwatch_telemetry.fields import (
    Age,
    AtLeastOne,
    Bytes,
    Interval,
    NotNegative,
    Positive,
    Section,
)

Url = Annotated[str, Meta(pattern=r"^https?://[^/?#@\s]+")]


class HttpConfig(Section, frozen=True, kw_only=True):
    """``peers``: of the name that resolves to every daemon; ``public_url``: for links to this one.

    Nothing is passed on and nothing linked to until somebody says where.
    """

    listen: Annotated[str, check_listen] = "127.0.0.1:9400"
    web_config: Path | None = None
    token_file: Path | None = None
    token_required: bool = False
    peers: Annotated[str, Meta(pattern=r"^https?://[^/?#@\s]+/?$")] | None = None
    peers_ca_file: Path | None = None
    public_url: Url | None = None


class RendezvousConfig(Section, frozen=True, kw_only=True):
    """``kineto``: the socket for stock PyTorch's own captures."""

    dir: str = "auto"
    inbox: str = "auto"
    poll_interval_s: Interval = 0.2
    kineto: bool = True


class NvmlConfig(Section, frozen=True, kw_only=True):
    """``mismatch_grace_s``: how long library and driver may differ before the daemon ends."""

    enabled: bool = True
    interval_s: Interval = 1.0
    stuck_after_s: Positive = 5.0
    gpm: bool = True
    mismatch_grace_s: NotNegative = 60.0


class KernelLogConfig(Section, frozen=True, kw_only=True):
    """Where the kernel log cannot be read, XIDs come from the driver's events alone."""

    enabled: bool = True
    path: Path = Path("/dev/kmsg")


class SimulatedConfig(Section, frozen=True, kw_only=True):
    enabled: bool = False
    devices: Annotated[int, Meta(ge=1, le=64)] = 8
    profile: Literal["h100", "a100", "l4"] = "h100"
    interval_s: Interval = 1.0


class HostConfig(Section, frozen=True, kw_only=True):
    enabled: bool = True
    interval_s: Interval = 1.0


class ProcessesConfig(Section, frozen=True, kw_only=True):
    """Processor time and memory of the processes that use a GPU."""

    enabled: bool = True
    interval_s: Interval = 5.0


class DcgmConfig(Section, frozen=True, kw_only=True):
    """``address``: a running host engine's, or ``embedded``. ``bindings``: DCGM's Python folder."""

    enabled: bool = False
    address: str = "localhost:5555"
    bindings: Path | None = None
    interval_s: Interval = 1.0


class DcgmExporterConfig(Section, frozen=True, kw_only=True):
    """A running dcgm-exporter, for what NVML cannot give."""

    url: Annotated[str, Meta(pattern=r"^https?://")] | None = None
    interval_s: Interval = 10.0


class SourcesConfig(Section, frozen=True, kw_only=True):
    nvml: NvmlConfig = NvmlConfig()
    kernel_log: KernelLogConfig = KernelLogConfig()
    simulated: SimulatedConfig = SimulatedConfig()
    host: HostConfig = HostConfig()
    processes: ProcessesConfig = ProcessesConfig()
    dcgm: DcgmConfig = DcgmConfig()
    dcgm_exporter: DcgmExporterConfig = DcgmExporterConfig()


class AttributionConfig(Section, frozen=True, kw_only=True):
    """Whose work runs on the devices.

    ``kubelet_socket``: auto (where it exists), off, or a path. ``slurm``: auto (the processes'
    control groups), off, or a folder with a file for each device UUID that holds its job ids.
    """

    kubelet_socket: str = "auto"
    slurm: str = "auto"
    interval_s: Interval = 10.0


class StoreConfig(Section, frozen=True, kw_only=True):
    url: Annotated[str, Meta(pattern=r"^file:///")] = "file:///var/lib/warpwatch/captures"
    max_bytes: Bytes = 5 * 2**30
    max_age: Age = 14 * 86400.0
    max_captures: AtLeastOne = 1000


class JsonlConfig(Section, frozen=True, kw_only=True):
    path: Path | None = None


class PrometheusConfig(Section, frozen=True, kw_only=True):
    """``dcgm_names``: the names of dcgm-exporter's default list as well."""

    dcgm_names: bool = False
    workload_labels: Literal["join", "inline"] = "join"


class GrafanaConfig(Section, frozen=True, kw_only=True):
    """Annotations; ``token_file``: of a service account that may write them.

    ``ca_file``: the system's authorities know a Grafana with a public certificate, no other.
    """

    url: Url | None = None
    token_file: Path | None = None
    ca_file: Path | None = None


class ExportersConfig(Section, frozen=True, kw_only=True):
    prometheus: PrometheusConfig = PrometheusConfig()
    jsonl: JsonlConfig = JsonlConfig()
    grafana: GrafanaConfig = GrafanaConfig()


class Config(Section, frozen=True, kw_only=True):
    http: HttpConfig = HttpConfig()
    rendezvous: RendezvousConfig = RendezvousConfig()
    sources: SourcesConfig = SourcesConfig()
    attribution: AttributionConfig = AttributionConfig()
    detectors: DetectorsConfig = DetectorsConfig()
    anomalies: AnomaliesConfig = AnomaliesConfig()
    triggers: TriggersConfig = TriggersConfig()
    store: StoreConfig = StoreConfig()
    exporters: ExportersConfig = ExportersConfig()


def load(path: Path | None, environ: Mapping[str, str] = os.environ) -> Config:
    """The configuration of ``path`` (None: zero configuration) with the environment on top.

    Raises UsageError with one line that names the key, the value and what would be right.
    """
    origin = str(path) if path else "the environment"
    tree = read_yaml(path) if path else {}
    overlay(tree, environ)
    return parse(tree, origin)


def parse(tree: dict[str, Any], origin: str) -> Config:
    """The configuration of a tree that came from ``origin``. Raises UsageError as ``load``."""
    # A section whose keys are all commented out is an empty one.
    tree = {key: {} if value is None else value for key, value in tree.items()}
    try:
        return convert(tree, Config)
    except NotConvertibleError as error:
        first, *others = error.mistakes
        more = f" (and {len(others)} more)" if others else ""
        raise UsageError(f"{origin}: {first}{more}") from error


def as_tree(config: Config) -> dict[str, Any]:
    """What YAML and JSON can hold, and ``parse`` reads."""
    tree: dict[str, Any] = _with_lists(msgspec.to_builtins(config, enc_hook=str))
    return tree


def _with_lists(node: Any) -> Any:
    """Some versions of msgspec keep tuples, which are equal to no list."""
    if isinstance(node, dict):
        return {key: _with_lists(value) for key, value in node.items()}
    return [_with_lists(each) for each in node] if isinstance(node, tuple | list) else node
