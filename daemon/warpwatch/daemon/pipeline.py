"""The daemon's one stream: what the sources saw → telemetry log, detectors, captures.

Everything here runs in one loop, so detectors and captures need no locks among themselves.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence

from warpwatch.daemon.captures.coordinator import Coordinator
from warpwatch.daemon.config import RecipeConfig
from warpwatch.daemon.detection import Detection
from warpwatch.daemon.errors import Refused
from warpwatch.daemon.hub import Hub
from warpwatch.daemon.sources.ranks import RanksSource
from warpwatch.exporters.jsonl import JsonlWriter
from warpwatch.telemetry.anomalies import Anomaly
from warpwatch.telemetry.captures import CaptureRequest
from warpwatch.telemetry.records import Clock, Record

logger = logging.getLogger(__name__)


class Pipeline:
    def __init__(
        self,
        hub: Hub,
        ranks: RanksSource,
        detection: Detection,
        coordinator: Coordinator,
        recipes: Mapping[str, RecipeConfig],
        log: JsonlWriter | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.recipes = recipes
        self._hub = hub
        self._ranks = ranks
        self._detection = detection
        self._coordinator = coordinator
        self._log = log
        self._clock = clock
        self._opened: set[str] = set()
        self._log_failed: int | None = None

    def step(self) -> None:
        now = self._clock()
        records = [*self._hub.take_records(), *self._ranks.poll(now)]
        records.sort(key=lambda record: record.time)
        self._write(records)
        for record in [*records, Clock(now)]:
            self._coordinator.observe(record)
            for anomaly in self._detection.feed(record):
                self._judge(anomaly)
        self._coordinator.advance(now)
        self._hub.publish_ranks(self._ranks.states(now))
        self._hub.publish_anomalies((*self._detection.history, *self._detection.active))

    def _write(self, records: Sequence[Record]) -> None:
        if self._log is None or not records:
            return
        try:
            self._hub.count("jsonl_records_total", by=self._log.write(records))
        except OSError as error:
            self._hub.count("jsonl_errors_total")
            if self._log_failed is None or self._log_failed != error.errno:
                logger.error("cannot write the telemetry log: %s", error.strerror)
            self._log_failed = error.errno

    def _judge(self, anomaly: Anomaly) -> None:
        """An anomaly was opened, changed or closed."""
        if anomaly.end_time is not None:
            self._opened.discard(anomaly.id)
            return
        if anomaly.id in self._opened:
            return
        self._opened.add(anomaly.id)
        self._hub.count("anomalies_total", anomaly.kind, anomaly.severity)
        logger.warning("%s: %s", anomaly.kind, anomaly.summary)
        recipe = self.recipes.get(anomaly.kind)
        if recipe is None or anomaly.job is None:
            return
        request = CaptureRequest(
            job=anomaly.job,
            kind=recipe.kind,
            trigger="anomaly",
            steps=recipe.steps,
            reason=anomaly.summary,
            anomaly_id=anomaly.id,
            anomaly_kind=anomaly.kind,
        )
        try:
            self._coordinator.request(request)
        except Refused:
            # Counted and logged where it was refused.
            return
