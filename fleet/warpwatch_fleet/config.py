"""The section `fleet`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from warpwatch_capturing.config import RemoteStoreConfig, Steps, StoreConfig, TriggersConfig
from warpwatch_detection.config import AnomaliesConfig, DetectionConfig
from warpwatch_exporters.config import ExportersConfig
from warpwatch_runtime.bus import BusConfig, TlsConfig
from warpwatch_serving.config import Listen
from warpwatch_telemetry.sections import WHOLE, Age, AtLeastOne, Boolean, Section, Url

ADDRESS = r"^(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):\d{1,5}$"
Address = Annotated[str, Field(pattern=ADDRESS)]


class AgentsConfig(TlsConfig):
    """How agents are spoken to: the token that they ask for, and by whom they are certified.

    With ``ca_file`` it is https, verified for the target's name. In plain text a token goes to an
    agent only where ``allow_plain`` says so. owner_token_files: by owner, the token of the owner's
    agents, which are not sent the other one.
    """

    token_file: Path | None = None
    owner_token_files: dict[str, Path] = Field(default={})
    allow_plain: Boolean = False

    @property
    def token_files(self) -> dict[str | None, Path]:
        """The files by owner, None for agents that report for everybody."""
        files: dict[str | None, Path] = dict(self.owner_token_files.items())
        if self.token_file is not None:
            files[None] = self.token_file
        return files

    @model_validator(mode="after")
    def _token_is_not_shown(self) -> Self:
        if self.token_files and self.ca_file is None and not self.allow_plain:
            raise ValueError(
                "token_file would go to the agents in plain text; give ca_file, "
                "or set allow_plain: true"
            )
        return self


class ScheduleConfig(Section):
    """Regular captures of healthy jobs whose name matches ``job`` (shell-style).

    ``ranks`` on as many nodes as possible are captured ``every`` so often. Five steps are as in
    PyTorch's own examples; eight ranks tell one slow rank from a slow job.
    """

    job: Annotated[str, Field(min_length=1, max_length=512)]
    every: Annotated[Age, Field(ge=600.0)]
    kind: Literal["torch", "memory"] = "torch"
    steps: Steps = 5
    ranks: Annotated[int, Field(ge=1, le=64), WHOLE] = 8


class InjectionConfig(Section):
    """The webhook that adds the shim to pods.

    It has an address, a certificate, and ``file`` with the parts that are added.
    """

    listen: Listen
    cert_file: Path
    key_file: Path
    file: Path


class KubernetesConfig(Section):
    """The fleet's work in its cluster; none by default.

    ``dry_run``: taints are only logged. ``clear_after``: the time for which a node is healthy
    before its taint is removed. ``service_account``: the folder with ``token`` and ``ca.crt``.
    """

    events: Boolean = False
    conditions: Boolean = False
    taints: Boolean = False
    dry_run: Boolean = True
    max_tainted: AtLeastOne = 1
    clear_after: Age = 3600.0
    captures: Boolean = False
    injection: InjectionConfig | None = None
    service_account: Path = Path("/var/run/secrets/kubernetes.io/serviceaccount")

    @model_validator(mode="after")
    def _taints_follow_conditions(self) -> KubernetesConfig:
        if self.taints and not self.conditions:
            raise ValueError("taints: a taint follows the condition GpuHealthy; set conditions")
        return self


class FleetConfig(Section):
    """The agents that a fleet follows, and how it serves what it knows.

    ``targets``, ``targets_files`` (file_sd of Prometheus) and ``targets_dns`` (every address of a
    name) together are the agents. ``token_file``: the token for requests to the fleet.
    ``metrics_token``: whether ``/metrics`` needs it too.
    ``probe_listen``: an address for probes alone. ``state_dir``: the state of jobs and captures for
    the next start. ``public_url``: the fleet's address for users, for links.
    """

    listen: Listen = "127.0.0.1:9401"
    probe_listen: Listen | None = None
    targets: tuple[Address, ...] = ()
    targets_files: tuple[Path, ...] = ()
    targets_dns: Address | None = None
    token_file: Path | None = None
    metrics_token: Boolean = False
    web_config: Path | None = None
    agents: AgentsConfig = AgentsConfig()
    schedules: tuple[ScheduleConfig, ...] = ()
    state_dir: Path = Path("/var/lib/warpwatch/fleet")
    public_url: Url | None = None
    kubernetes: KubernetesConfig = KubernetesConfig()


# A section that only an agent reads.
_Unread = Annotated[dict[str, Any], Field(default_factory=dict, repr=False)]


class FleetFile(Section):
    """The whole file, as `warpwatch fleet` reads it. Agents can be given the same file.

    node: the name of this fleet's host for exporters.
    """

    node: Annotated[str, Field(min_length=1, max_length=253)] | None = None
    detection: DetectionConfig = DetectionConfig()
    anomalies: AnomaliesConfig = AnomaliesConfig()
    triggers: TriggersConfig = TriggersConfig()
    store: StoreConfig = StoreConfig()
    remote_store: RemoteStoreConfig = RemoteStoreConfig()
    exporters: ExportersConfig = ExportersConfig()
    fleet: FleetConfig = FleetConfig()
    bus: BusConfig = BusConfig()
    http: _Unread
    rendezvous: _Unread
    sources: _Unread
    attribution: _Unread
