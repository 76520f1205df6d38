"""Where the fleet keeps its captures, and their way into the remote store."""

from __future__ import annotations

import atexit
import logging
import tempfile
from collections.abc import Callable
from pathlib import Path

from warpwatch_capturing.config import StoreConfig
from warpwatch_capturing.register import CaptureRegister
from warpwatch_capturing.store import Store
from warpwatch_fleet.captures.requests import Captures
from warpwatch_fleet.config import FleetFile
from warpwatch_runtime.agent_metrics import AgentMetrics
from warpwatch_telemetry.errors import UsageError

logger = logging.getLogger(__name__)

# Who brought what the fleet itself writes.
BY = "fleet"


def open_store(config: FleetFile) -> Store:
    """In ``fleet.state_dir``, within the limits of ``store``; else until the fleet ends."""
    try:
        return Store(_at(config, config.fleet.state_dir))
    except UsageError as error:
        logger.warning("captures are not kept over a restart; set fleet.state_dir: %s", error)
        folder = tempfile.TemporaryDirectory(prefix="warpwatch-fleet-")
        atexit.register(folder.cleanup)
        return Store(_at(config, Path(folder.name)))


def _at(config: FleetFile, folder: Path) -> StoreConfig:
    return config.store.model_copy(update={"url": (folder.absolute() / "captures").as_uri()})


def uploads(
    config: FleetFile,
    store: Store,
    register: CaptureRegister,
    captures: Captures,
    metrics: AgentMetrics,
) -> Callable[[], None] | None:
    """What a loop is to do; None where it is not wanted. Raises UsageError."""
    url = config.remote_store.url
    if url is None:
        return None
    from warpwatch_capturing.remote.remote_store import RemoteStore
    from warpwatch_capturing.remote.uploads import Uploads

    is_settled = captures.is_settled
    return Uploads(RemoteStore(url), store.path, register, is_settled, metrics, BY).advance
