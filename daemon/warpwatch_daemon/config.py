"""Composes the agent's configuration from the sections of its packages, and reloads it.

A changed configuration is validated, then swapped as far as no restart is needed.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from warpwatch_capturing.config import RemoteStoreConfig, StoreConfig, TriggersConfig
from warpwatch_capturing.policy import Policy
from warpwatch_detection.config import AnomaliesConfig, DetectionConfig
from warpwatch_devices.config import AttributionConfig, SourcesConfig
from warpwatch_exporters.config import ExportersConfig
from warpwatch_runtime import loading
from warpwatch_runtime.agent_metrics import AgentMetrics
from warpwatch_runtime.bus import BusConfig
from warpwatch_serving.config import HttpConfig
from warpwatch_telemetry.errors import UsageError
from warpwatch_telemetry.sections import Bytes, Section

logger = logging.getLogger(__name__)


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


# A reload swaps these sections; every other change needs a restart.
RELOADABLE = frozenset({"triggers"})


class Reloading:
    """Reloads on request. ``request`` is safe in a signal handler; one loop calls ``advance``."""

    def __init__(
        self,
        config: Config,
        path: Path | None,
        environ: Mapping[str, str],
        policy: Policy,
        metrics: AgentMetrics,
    ) -> None:
        self._config = config
        self._path = path
        self._environ = environ
        self._policy = policy
        self._reloads = metrics.counter("config_reloads_total")
        self._asked = False

    def request(self) -> None:
        """Let the next ``advance`` read the file: a signal handler must not lock."""
        self._asked = True

    def advance(self) -> None:
        """Reload if requested; a wrong file changes nothing, is logged and counted."""
        if not self._asked:
            return
        self._asked = False
        try:
            new = loading.load(Config, self._path, self._environ)
        except UsageError as error:
            self._reloads.labels("failed").inc()
            logger.error("reload failed, old configuration kept: %s", error)
            return
        self._swap(new)
        self._reloads.labels("ok").inc()
        logger.info("configuration reloaded")

    def _swap(self, new: Config) -> None:
        old = self._config
        changed = [n for n in Config.model_fields if getattr(new, n) != getattr(old, n)]
        fixed = [name for name in changed if name not in RELOADABLE]
        if fixed:
            logger.warning("changes of %s need a restart", ", ".join(fixed))
        self._policy.config = new.triggers
        self._config = old.model_copy(update={"triggers": new.triggers})


# The kubelet updates files within about a minute; this adds little.
WATCH_INTERVAL_S = 10.0


class ConfigWatch:
    """Detects changes of a file. Make it before the file is loaded, so that none is missed.

    The kubelet replaces a ConfigMap's file without a signal. Contents are compared, not times: it
    swaps a link above the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._content = self._read()

    def changed(self) -> bool:
        """Return whether the file changed since the last call; a missing file has not."""
        content = self._read()
        if content is None or content == self._content:
            return False
        self._content = content
        logger.info("%s has changed", self._path)
        return True

    def _read(self) -> bytes | None:
        try:
            return self._path.read_bytes()
        except OSError:
            return None
