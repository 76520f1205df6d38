"""Composes the agent's configuration from the sections of its packages."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from warpwatch_capturing.config import RemoteStoreConfig, StoreConfig, TriggersConfig
from warpwatch_detection.config import AnomaliesConfig, DetectionConfig
from warpwatch_devices.config import AttributionConfig, SourcesConfig
from warpwatch_exporters.config import ExportersConfig
from warpwatch_runtime.bus import BusConfig
from warpwatch_serving.config import HttpConfig
from warpwatch_telemetry.sections import Bytes, Section


class RendezvousConfig(Section):
    """``owner_bytes``: the limit of the inbox for each pod, or for each user in the shared folder.

    An owner over the limit is not captured, and its oldest files are removed.
    """

    dir: str = "auto"
    inbox: str = "auto"
    owner_bytes: Bytes = 8 * 2**30


class Config(Section):
    """The agent's configuration. ``node``: its name, by default NODE_NAME or the host's name.

    ``fleet``: ignored here; `warpwatch fleet` reads and checks it.
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
    bus: BusConfig = BusConfig()
    fleet: dict[str, Any] = Field(default={}, repr=False)
