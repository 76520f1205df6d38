"""Captures into the remote store, where its address is configured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from warpwatch_daemon.captures.coordinator import Coordinator
from warpwatch_daemon.captures.store import Store
from warpwatch_daemon.config.sections import Config
from warpwatch_daemon.state.agent_metrics import AgentMetrics

if TYPE_CHECKING:
    from warpwatch_daemon.history.uploads import Uploads


def uploads(
    config: Config,
    store: Store,
    coordinator: Coordinator,
    metrics: AgentMetrics,
    node: str,
    environ: Mapping[str, str],
) -> Uploads | None:
    """None where it is not wanted; what it needs is loaded only where it is. Raises UsageError."""
    url = config.remote_store.url
    if url is None:
        return None
    from warpwatch_daemon.history.remote_store import RemoteStore
    from warpwatch_daemon.history.uploads import Uploads

    remote = RemoteStore(url, environ)
    register, is_settled = coordinator.register, coordinator.is_settled
    return Uploads(remote, store.path, register, is_settled, metrics, node)
