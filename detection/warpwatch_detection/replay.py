"""Feeds a log of records to the engine, and returns what the daemon would have found."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

from warpwatch_detection.anomalies.tracked import EndedKey, Suppressed
from warpwatch_detection.config import AnomaliesConfig, DetectionConfig
from warpwatch_detection.detector import DetectorStatus
from warpwatch_detection.engine import Detection
from warpwatch_detection.ranks import as_exit
from warpwatch_telemetry.anomalies import Anomaly
from warpwatch_telemetry.jobs import JobId
from warpwatch_telemetry.records import Record, Step

# A number below this is a step, a higher one a time of the wall clock (from September 2001 on).
FIRST_TIME_S = 1e9


class LogReplay:
    """One run of the engine. With ``explain`` it keeps statuses and suppressed findings too.

    anomalies: the last form of each anomaly, by id; closed ones have their end_time.
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

    def run(
        self, records: Iterable[Record], until: float | None = None, job: str | None = None
    ) -> Iterator[Anomaly]:
        """Yield every anomaly when it opens.

        until: a step or a time (wall clock, seconds) before which to stop, as for FIRST_TIME_S.
        job: the name of the job whose steps count for that, by default any.
        At the end it raises the first error of a detector.
        """
        feed = self._engine.feed
        if until is not None:
            records = itertools.takewhile(
                lambda record: not _is_reached(record, until, job), records
            )
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
        """Return kind and status of each job, rank and device; for ended jobs the last status."""
        self._keep_statuses()
        return [(key[0], status) for key, status in self._statuses.items()]

    def suppressed(self) -> list[Suppressed]:
        """Return the findings that were not opened because an active anomaly explained them."""
        self._keep_suppressed()
        return list(self._suppressed.values())

    def _explained(self, records: Iterable[Record]) -> Iterator[Record]:
        """Keep statuses and suppressed findings before a record makes the engine forget them."""
        for record in records:
            if as_exit(record):
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


def _is_reached(record: Record, until: float, job: str | None) -> bool:
    if until >= FIRST_TIME_S:
        return record.time >= until
    return isinstance(record, Step) and job in (None, record.job) and record.step >= until
