"""Captures and summaries of runs into the remote store, where its address is configured."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from warpwatch_daemon.captures.coordinator import Coordinator
from warpwatch_daemon.captures.store import Store
from warpwatch_daemon.config.sections import Config
from warpwatch_daemon.history.runs.run_table import RunTable
from warpwatch_daemon.state.agent_metrics import AgentMetrics


def uploads(
    config: Config,
    store: Store,
    coordinator: Coordinator,
    runs: RunTable,
    metrics: AgentMetrics,
    node: str,
    environ: Mapping[str, str],
) -> Callable[[], None] | None:
    """What a loop is to do; None where it is not wanted. Raises UsageError.

    What it needs is loaded only where it is wanted.
    """
    url = config.remote_store.url
    if url is None:
        return None
    from warpwatch_daemon.history.remote_store import RemoteStore
    from warpwatch_daemon.history.runs.run_uploads import RunUploads
    from warpwatch_daemon.history.uploads import Uploads

    remote = RemoteStore(url, environ)
    register, is_settled = coordinator.register, coordinator.is_settled
    of_captures = Uploads(remote, store.path, register, is_settled, metrics, node)
    of_runs = RunUploads(remote, runs, metrics)

    def advance() -> None:
        of_captures.advance()
        of_runs.advance()

    return advance
