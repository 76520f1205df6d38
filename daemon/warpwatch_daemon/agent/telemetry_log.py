"""The telemetry log, written in a loop of its own: no step waits for its disk."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence

from warpwatch_daemon.config.sections import Config
from warpwatch_exporters.jsonl import JsonlWriter
from warpwatch_runtime.agent_metrics import AgentMetrics
from warpwatch_telemetry.errors import UsageError
from warpwatch_telemetry.records import Clock, Record

logger = logging.getLogger(__name__)

WRITE_INTERVAL_S = 0.2
# How long the log may be silent: deadlines pass in a replay as they did here.
SILENCE_S = 5.0
# While the disk does not answer, newer records are lost and counted: some 100 MB at most.
MAX_WAITING = 200_000


class TelemetryLog:
    """``put`` is the pipeline's, ``write`` the loop's."""

    def __init__(
        self,
        writer: JsonlWriter,
        metrics: AgentMetrics,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._writer = writer
        self._records = metrics.counter("jsonl_records_total")
        # There from the start, so that an increase can be seen.
        self._errors = metrics.counter("jsonl_errors_total")
        self._waiting: deque[Record] = deque()
        self._put_time = wall()
        self._failed: int | None = None

    def put(self, records: Sequence[Record], now: float) -> None:
        """These records, or after a silence that time has passed."""
        if not records:
            if now - self._put_time < SILENCE_S:
                return
            records = [Clock(now)]
        self._put_time = now
        if len(self._waiting) > MAX_WAITING:
            self._errors.inc()
        else:
            self._waiting.extend(records)

    def write(self) -> None:
        records = [self._waiting.popleft() for _ in range(len(self._waiting))]
        try:
            self._records.inc(self._writer.write(records))
        except OSError as error:
            self._errors.inc()
            if self._failed is None or self._failed != error.errno:
                logger.error("cannot write the telemetry log: %s", error.strerror)
            self._failed = error.errno


def telemetry_log(config: Config, metrics: AgentMetrics) -> TelemetryLog | None:
    """None where none is wanted. Raises UsageError."""
    path = config.exporters.jsonl.path
    if path is None:
        return None
    try:
        return TelemetryLog(JsonlWriter(path), metrics)
    except OSError as error:
        raise UsageError(
            f"cannot write the telemetry log {path}: {error.strerror}; set exporters.jsonl.path"
        ) from error
