"""All sections of the configuration; those of other packages are declared there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from warpwatch_daemon.config.triggers import TriggersConfig
from warpwatch_detection.config import AnomaliesConfig, DetectionConfig
from warpwatch_devices.config import AttributionConfig, SourcesConfig
from warpwatch_exporters.config import ExportersConfig
from warpwatch_telemetry.sections import Age, AtLeastOne, Boolean, Bytes, Section, Url

# The last colon is before the port. IPv6 also without brackets, as $(POD_IP):9400 has it.
_LISTEN = re.compile(
    r"(\[[0-9A-Fa-f:]+\]|([0-9A-Fa-f]{0,4}:){2,7}[0-9A-Fa-f]{1,4}|[^:\s]*):\d{1,5}"
)
# S3, Google Cloud Storage, Azure Blob Storage, or a folder that many nodes mount. A secret in the
# query would be shown with the address of each capture.
_REMOTE = r"^(file:///|(s3a?|gs|az|adl|azure|abfss?)://)[^?#\s]+$"


def _listen(value: str) -> str:
    if not _LISTEN.fullmatch(value):
        raise ValueError("an address and a port are needed, such as 127.0.0.1:9400")
    return value


Listen = Annotated[str, AfterValidator(_listen)]


class HttpConfig(Section):
    """``public_url``: for links to this daemon, which none are made of without.

    ``metrics_token``: whether ``/metrics`` needs the token too. ``probe_listen``: where nothing but
    probes is answered.
    """

    listen: Listen = "127.0.0.1:9400"
    web_config: Path | None = None
    token_file: Path | None = None
    metrics_token: Boolean = False
    probe_listen: Listen | None = None
    public_url: Url | None = None

    def public_url_of(self, node: str) -> str:
        return (self.public_url or "").replace("{node}", node)


class RendezvousConfig(Section):
    """``owner_bytes``: the limit of the inbox for each pod, or for each user in the shared folder.

    An owner over the limit is not captured, and its oldest files are removed.
    """

    dir: str = "auto"
    inbox: str = "auto"
    owner_bytes: Bytes = 8 * 2**30


class StoreConfig(Section):
    url: Annotated[str, Field(pattern=r"^file:///")] = "file:///var/lib/warpwatch/captures"
    max_bytes: Bytes = 5 * 2**30
    max_age: Age = 14 * 86400.0
    max_captures: AtLeastOne = 1000


class RemoteStoreConfig(Section):
    """``url``: of a folder in an object store, which holds nothing secret; null: none."""

    url: Annotated[str, Field(pattern=_REMOTE)] | None = None


class Config(Section):
    """``node``: what this node is called, else NODE_NAME or the host's name says.

    ``fleet``: what `warpwatch fleet` reads, and checks; nothing to an agent.
    """

    node: Annotated[str, Field(min_length=1, max_length=253)] | None = None
    http: HttpConfig = HttpConfig()
    rendezvous: RendezvousConfig = RendezvousConfig()
    sources: SourcesConfig = SourcesConfig()
    attribution: AttributionConfig = AttributionConfig()
    detection: DetectionConfig = DetectionConfig()
    anomalies: AnomaliesConfig = AnomaliesConfig()
    triggers: TriggersConfig = TriggersConfig()
    store: StoreConfig = StoreConfig()
    remote_store: RemoteStoreConfig = RemoteStoreConfig()
    exporters: ExportersConfig = ExportersConfig()
    fleet: dict[str, Any] = Field(default={}, repr=False)
