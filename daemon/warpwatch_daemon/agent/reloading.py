"""A changed configuration: validated first, then swapped where that needs no restart."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from warpwatch_capturing.policy import Policy
from warpwatch_daemon.config import Config
from warpwatch_runtime import loading
from warpwatch_runtime.agent_metrics import AgentMetrics
from warpwatch_telemetry.errors import UsageError

logger = logging.getLogger(__name__)

# Sections that a reload swaps; every other change needs a restart.
RELOADABLE = frozenset({"triggers"})


class Reloading:
    """``ask`` from anywhere, also from a signal handler; ``advance`` from one loop."""

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

    def ask(self) -> None:
        """The next ``advance`` reads the file: in a signal handler nothing may be locked."""
        self._asked = True

    def advance(self) -> None:
        """A file that is wrong changes nothing, is logged and counted."""
        if not self._asked:
            return
        self._asked = False
        try:
            new = loading.load(Config, self._path, self._environ)
        except UsageError as error:
            self._reloads.labels("failed").inc()
            logger.error("the configuration stays as it was: %s", error)
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


# The kubelet brings a change within a minute or so; this adds little to it.
WATCH_INTERVAL_S = 10.0


class ConfigWatch:
    """Made before the file is loaded, so that no change falls between the two.

    A ConfigMap's file is exchanged in place, a while after the ConfigMap was changed, and nothing
    sends SIGHUP. Contents are compared, not times: the kubelet swaps a link above the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._content = self._read()

    def changed(self) -> bool:
        """Since it was asked last. A file that is away for a moment has not changed."""
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
