"""Feeds a log of records to the engine, and returns what the daemon would have found."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

from warpwatch_detection.anomalies.tracked import EndedKey, Suppressed
from warpwatch_detection.config import AnomaliesConfig, DetectionConfig
from warpwatch_detection.detector import DetectorStatus
from warpwatch_detection.engine import Detection
from warpwatch_telemetry.anomalies import Anomaly
from warpwatch_telemetry.jobs import JobId
from warpwatch_telemetry.records import End, RankEvent, Record, Step

# A number below is a step, one from here on a wall clock (September 2001).
FIRST_TIME_S = 1e9


class LogReplay:
    """One run of the engine: its anomalies and, to ``explain``, all that led to them.

    anomalies: all of them by id, as they were last; with their end_time if they are over.
    """

    def __init__(
        self,
        kinds: DetectionConfig | None = None,
        anomalies: AnomaliesConfig | None = None,
        *,
        explain: bool = False,
    ) -> None:
        self.anomalies: dict[str, Anomaly] = {}
        self._explain = explain
        self._engine = Detection(kinds, anomalies)
        self._statuses: dict[EndedKey, DetectorStatus] = {}
        self._suppressed: dict[tuple[str, JobId | None, str], Suppressed] = {}

    def run(self, records: Iterable[Record], until: float | None = None) -> Iterator[Anomaly]:
        """Yield every anomaly when it opens.

        until: a step or a time (wall clock, seconds) before which to stop, as FIRST_TIME_S says.
        Raises what a detector raised, at the end.
        """
        feed = self._engine.feed
        if until is not None:
            records = itertools.takewhile(lambda record: not _is_reached(record, until), records)
        if self._explain:
            records = self._explained(records)
        for record in records:
            for change in feed(record):
                self.anomalies[change.anomaly.id] = change.anomaly
                if change.what == "opened":
                    yield change.anomaly
        if failure := self._engine.pop_failure():
            raise failure

    def statuses(self) -> list[tuple[str, DetectorStatus]]:
        """Return kind and status of all that was evaluated; of ended jobs the last status."""
        self._keep_statuses()
        return [(key[0], status) for key, status in self._statuses.items()]

    def suppressed(self) -> list[Suppressed]:
        """Return findings that were not opened, because an active anomaly was their cause."""
        self._keep_suppressed()
        return list(self._suppressed.values())

    def _explained(self, records: Iterable[Record]) -> Iterator[Record]:
        """Keep statuses and suppressed findings before the engine forgets them with a record."""
        for record in records:
            died = isinstance(record, RankEvent) and record.event == "died"
            if died or isinstance(record, End):
                self._keep_statuses()
            self._keep_suppressed()
            yield record

    def _keep_statuses(self) -> None:
        for kind, some in self._engine.statuses().items():
            for status in some:
                self._statuses[kind, status.job_id, status.device, status.rank] = status

    def _keep_suppressed(self) -> None:
        for one in self._engine.suppressed:
            self._suppressed[one.kind, one.found.job_id, one.cause_id] = one


def _is_reached(record: Record, until: float) -> bool:
    if until >= FIRST_TIME_S:
        return record.time >= until
    return isinstance(record, Step) and record.step >= until
