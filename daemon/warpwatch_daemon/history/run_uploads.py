"""Copies summaries of runs into the remote store, as ``runs/<owner>/<job>/<run>.json``.

A run is copied at its end, and every ten minutes before, under the same name. The daemon with
rank 0 of a multi-node job copies it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace

import msgspec

from warpwatch_capturing.remote_store import RemoteStore, RemoteStoreError
from warpwatch_daemon.history.runs import FOLDER, RunTable, key_of
from warpwatch_runtime.agent_metrics import AgentMetrics
from warpwatch_runtime.supervisor import Pause
from warpwatch_telemetry.captures import UPLOAD_OUTCOMES
from warpwatch_telemetry.jobs import JobId, RunSummary

logger = logging.getLogger(__name__)

INTERVAL_S = 600.0


class RunUploads:
    """The uploads of runs. ``advance`` waits for the network, in a loop of its own."""

    def __init__(
        self,
        remote: RemoteStore,
        runs: RunTable,
        metrics: AgentMetrics,
        monotonic: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._remote = remote
        self._runs = runs
        self._wall = wall
        outcomes = metrics.counter("uploads_total")
        self._outcomes = {outcome: outcomes.labels("run", outcome) for outcome in UPLOAD_OUTCOMES}
        self._bytes = metrics.counter("upload_bytes_total")
        self._pending = metrics.gauge("uploads_pending").labels("run")
        self._pause = Pause(monotonic)
        self._waiting: set[JobId] = set()
        # When a running run was copied, wall clock.
        self._copied: dict[JobId, float] = {}

    def advance(self) -> None:
        waiting = self._look()
        if self._pause.lasts:
            return
        for summary in waiting:
            try:
                self._upload(summary)
            except RemoteStoreError as error:
                self._outcomes["failed"].inc()
                if self._pause.begin():
                    logger.error("cannot upload a summary, trying again: %s", error)
                break
            self._pause.reset()
        self._look()

    def _look(self) -> list[RunSummary]:
        now = self._wall()
        known = {summary.job_id: summary for summary in self._runs.all()}
        self._outcomes["given_up"].inc(len(self._waiting - known.keys()))
        waiting = [summary for summary in known.values() if self._is_due(summary, now)]
        self._waiting = {summary.job_id for summary in waiting}
        self._copied = {job: at for job, at in self._copied.items() if job in known}
        self._pending.set(len(waiting))
        return waiting

    def _is_due(self, summary: RunSummary, now: float) -> bool:
        if 0 not in summary.ranks:
            return False
        if summary.end_time is not None:
            return summary.remote is None
        return now - self._copied.get(summary.job_id, summary.first_time) >= INTERVAL_S

    def _upload(self, summary: RunSummary) -> None:
        """Copy a summary. Raises RemoteStoreError."""
        key = f"{FOLDER}/{key_of(summary.job_id)}"
        content = msgspec.json.encode(replace(summary, remote=None))
        self._remote.put(key, content)
        self._bytes.inc(len(content))
        self._outcomes["uploaded"].inc()
        self._copied[summary.job_id] = self._wall()
        self._runs.copied(summary, f"{self._remote.url}/{key}")
