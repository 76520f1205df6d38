"""The daemon's one stream: what the sources saw → telemetry log, detectors, captures.

Everything here runs in one loop, so detectors and captures need no locks among themselves.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence

from warpwatch.daemon.captures.coordinator import Coordinator
from warpwatch.daemon.config import RecipeConfig
from warpwatch.daemon.detection import Detection
from warpwatch.daemon.errors import Refused
from warpwatch.daemon.hub import Hub
from warpwatch.daemon.sources.ranks import RanksSource
from warpwatch.exporters.jsonl import JsonlWriter
from warpwatch.telemetry.anomalies import WHOLE_JOB_KINDS, Anomaly
from warpwatch.telemetry.captures import CaptureRequest
from warpwatch.telemetry.records import Clock, Record
from warpwatch.telemetry.samples import SourceHealth

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
    ) -> None:
        self.recipes = recipes
        self._hub = hub
        self._ranks = ranks
        self._detection = detection
        self._coordinator = coordinator
        self._log = log
        # Active anomalies by id, and what those of them ask for whose ranks are busy.
        self._opened: set[str] = set()
        self._waiting: dict[str, CaptureRequest] = {}
        self._log_failed: int | None = None
        if log is not None:
            # There from the start, so that an increase can be seen.
            hub.count("jsonl_errors_total", by=0)
        self._rank_errors = 0

    def step(self) -> None:
        now, at = time.time(), time.monotonic()
        records = [*self._hub.take_records(), *self._poll_ranks(now, at)]
        records.sort(key=lambda record: record.time)
        self._write(records)
        for record in [*records, Clock(now)]:
            self._coordinator.observe(record)
            for anomaly in self._detection.feed(record):
                self._judge(anomaly)
        self._coordinator.advance(at)
        self._ask_again()
        self._hub.publish_ranks(self._ranks.states(at))
        self._hub.publish_anomalies((*self._detection.history, *self._detection.active))

    def _poll_ranks(self, now: float, at: float) -> list[Record]:
        """A rendezvous that cannot be read costs the ranks, not the devices."""
        try:
            records = self._ranks.poll(now, at)
        except OSError as error:
            self._rank_errors += 1
            if self._rank_errors == 1:
                logger.error("cannot read the rendezvous: %s", error)
            reason = f"{error.strerror}: {error.filename}"
            self._hub.publish_health(SourceHealth("ranks", False, reason, 0.0, self._rank_errors))
            return []
        taken_s = time.monotonic() - at
        self._hub.publish_health(SourceHealth("ranks", True, "", taken_s, self._rank_errors))
        return records

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
        level = logging.INFO if anomaly.severity == "info" else logging.WARNING
        logger.log(
            level, "%s of %s: %s", anomaly.kind, anomaly.job or anomaly.device, anomaly.summary
        )
        recipe = self.recipes.get(anomaly.kind)
        if recipe is None or anomaly.job is None:
            return
        self._ask(
            CaptureRequest(
                job=anomaly.job,
                kind=recipe.kind,
                trigger="anomaly",
                steps=recipe.steps,
                options=tuple(sorted(set(recipe.options))),
                reason=anomaly.summary,
                anomaly_id=anomaly.id,
                anomaly_kind=anomaly.kind,
            )
        )

    def _ask(self, request: CaptureRequest) -> None:
        if self._is_for_other_node(request):
            self._hub.count("captures_total", request.kind, request.trigger, "refused_other_node")
            return
        try:
            self._coordinator.request(request)
        except Refused as refused:
            # Counted and logged where it was refused; only a busy rank is worth another try.
            if refused.reason == "refused_busy" and request.anomaly_id is not None:
                self._waiting[request.anomaly_id] = request

    def _is_for_other_node(self, request: CaptureRequest) -> bool:
        """Kinds of the whole job are acted on where rank 0 is."""
        local = self._ranks.targets(request.job)
        seen_whole = all(rank.claims.world_size <= len(local) for rank in local.values())
        return request.anomaly_kind in WHOLE_JOB_KINDS and not seen_whole and 0 not in local

    def _ask_again(self) -> None:
        """For anomalies that found their ranks busy and that are still there."""
        for anomaly_id, request in list(self._waiting.items()):
            if anomaly_id not in self._opened:
                del self._waiting[anomaly_id]
            elif not self._coordinator.is_busy(request.job):
                del self._waiting[anomaly_id]
                self._ask(request)
