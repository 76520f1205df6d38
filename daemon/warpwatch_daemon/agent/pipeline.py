"""Passes the one stream of records to the telemetry log, detectors, captures and a fleet."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import ParamSpec

from warpwatch_capturing.regular import RegularCaptures
from warpwatch_capturing.service import CaptureService
from warpwatch_capturing.triggers import Triggers
from warpwatch_daemon.config import Config
from warpwatch_daemon.for_fleet.leases import JobLeases
from warpwatch_daemon.for_fleet.record_stream import RecordStream
from warpwatch_daemon.history.archive import Archive
from warpwatch_daemon.history.runs import RunTable
from warpwatch_daemon.ranks.source import RanksSource
from warpwatch_daemon.state.hub import Hub
from warpwatch_detection.anomalies.register import Change
from warpwatch_detection.anomalies.tracked import Suppressed
from warpwatch_detection.detector import DetectorStatus
from warpwatch_detection.engine import Detection
from warpwatch_exporters.jsonl import JsonlWriter
from warpwatch_runtime.agent_metrics import AgentMetrics
from warpwatch_runtime.log_output import Complaint
from warpwatch_runtime.supervisor import run_all
from warpwatch_telemetry.anomalies import Anomaly, sentence
from warpwatch_telemetry.errors import UsageError
from warpwatch_telemetry.records import Clock, Record, Step
from warpwatch_telemetry.samples import SourceHealth

logger = logging.getLogger(__name__)

WRITE_INTERVAL_S = 0.2
# How long the log may be silent: deadlines pass in a replay as they did here.
SILENCE_S = 5.0
# If the disk hangs, newer records are lost and counted: about 100 MB at most.
MAX_WAITING = 200_000


class TelemetryLog:
    """The telemetry log, written in a loop of its own, so that no step waits for the disk.

    The pipeline calls ``put``, that loop ``write``.
    """

    def __init__(
        self, writer: JsonlWriter, metrics: AgentMetrics, wall: Callable[[], float] = time.time
    ) -> None:
        self._writer = writer
        self._records = metrics.counter("jsonl_records_total")
        # There from the start, so that an increase can be seen.
        self._errors = metrics.counter("jsonl_errors_total")
        self._waiting: deque[Record] = deque()
        self._put_time = wall()
        self._complaint = Complaint(logger)

    def put(self, records: Sequence[Record], now: float) -> None:
        """Add records, or after a silence one that tells the time."""
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
            self._complaint.make("cannot write the telemetry log: %s", error.strerror)
        else:
            if records:
                self._complaint.clear()


def telemetry_log(config: Config, metrics: AgentMetrics) -> TelemetryLog | None:
    """Return the configured log, or None. Raises UsageError."""
    path = config.exporters.jsonl.path
    if path is None:
        return None
    try:
        return TelemetryLog(JsonlWriter(path), metrics)
    except OSError as error:
        raise UsageError(
            f"cannot write the telemetry log {path}: {error.strerror}; set exporters.jsonl.path"
        ) from error


CLOSE_TIMEOUT_S = 3.0
# If more time passes between two rounds, all would look silent: the clock was set, the machine
# slept, or this process was stopped. A round comes many times per second.
LEAP_S = 10.0
# The interval of asking for sensitivities, which change slowly.
SENSITIVITIES_INTERVAL_S = 15.0

P = ParamSpec("P")


class Pipeline:
    """The one stream of records: to the log, the detectors, captures and a fleet."""

    def __init__(
        self,
        hub: Hub,
        ranks: RanksSource,
        detection: Detection,
        service: CaptureService,
        triggers: Triggers,
        baselines: RegularCaptures,
        archive: Archive,
        stream: RecordStream,
        log: TelemetryLog | None,
        runs: RunTable,
        monotonic: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._hub = hub
        self._ranks = ranks
        self._detection = detection
        self._service = service
        self._triggers = triggers
        self._baselines = baselines
        self._archive = archive
        self._stream = stream
        self.leases = JobLeases(monotonic, wall)
        self._monotonic = monotonic
        self._wall = wall
        self._log = log
        self._runs = runs
        # Held by the user of the detectors: this loop, and shortly a request for statuses.
        self._owner = threading.Lock()
        archive.parts["leases"] = self.leases
        archive.restore(wall(), self.leases.shown)
        # Changes that triggers do not have yet: at first, anomalies from before a restart.
        active = self.leases.shown(detection.active)
        self._changes = [Change("opened", anomaly) for anomaly in active]
        for anomaly in active:
            stream.put_anomaly(anomaly)
        # Changes by users since the last round.
        self._resolved: list[Change] = []
        # The wall clock of the last round; before the first one, time stands still anyway.
        self._round_time = math.inf
        # The first failure of this round.
        self._failure: Exception | None = None
        self._rank_errors = 0
        self._rank_complaint = Complaint(logger)
        self._sensitivities_due = 0.0
        hub.watch_ranks(lambda: ranks.states(monotonic()))
        self._export()
        self._publish()

    def _export(self) -> None:
        """Read the counts of the detection with each scrape."""
        hub, detection = self._hub, self._detection
        hub.metrics.read("anomalies_suppressed_total", lambda: detection.register.suppressed_counts)
        hub.metrics.read("detector_errors_total", lambda: detection.runner.failures)
        hub.metrics.read(
            "detection_refused_total",
            lambda: detection.refused | {"readings": hub.readings_dropped},
        )

    def step(self) -> None:
        """Run one round. A failure affects no other part; the first one is raised last."""
        now, at = self._wall(), self._monotonic()
        records = [*self._hub.take_records(), *self._poll_ranks(now, at), *self._runs.take_events()]
        # Steps of the same time, after a clock was set back, go by number.
        records.sort(key=lambda one: (one.time, one.step if type(one) is Step else math.inf))
        if self._log is not None:
            self._try(self._log.put, records, now)
        self._try(self._stream.put, records)
        with self._owner:
            self._notice_leap(now)
            resolved, self._resolved = self._resolved, []
            self._raise(resolved)
            for record in (*records, Clock(now)):
                self._feed(record)
            self._failure = self._failure or self._detection.pop_failure()
            self._raise(self.leases.expire(self._detection.active))
            self._try(self._archive.advance, now)
            self._try(self._update_sensitivities, at)
        self._try(self._runs.advance, now)
        self._try(self._stream.put_runs, self._runs.take_changed())
        self._try(self._service.advance, at)
        changes, self._changes = self._changes, []
        active = self.leases.shown(self._detection.active)
        self._try(self._triggers.advance, now, changes, active)
        self._try(self._baselines.advance, now, active)
        self._try(lambda: self._hub.follow_ranks(self._ranks.devices(at)))
        self._try(self._publish)
        self._try(self._stream.put_captures, self._hub.captures())
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _notice_leap(self, now: float) -> None:
        """Let time stand still for the detectors while nothing was read."""
        leap_s, self._round_time = now - self._round_time, now
        if leap_s > LEAP_S:
            logger.warning(
                "the clock was set, or the machine or this agent stood still: %.0f s were skipped",
                leap_s,
            )
            self._detection.skip_to(now)

    def _try(self, work: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> None:
        try:
            work(*args, **kwargs)
        except Exception as error:
            self._failure = self._failure or error

    def _feed(self, record: Record) -> None:
        """Hand a record to all parts; a failure of one does not affect the others."""
        self._try(self._service.observe, record)
        self._try(self._archive.observe, record)
        self._try(self._runs.observe, record)
        try:
            changes = self._detection.feed(record)
        except Exception as error:
            self._failure = self._failure or error
            return
        self._raise(self.leases.raised(changes))

    def _raise(self, changes: Iterable[Change]) -> None:
        for change in changes:
            self._changes.append(change)
            self._try(self._archive.note_change, change)
            self._try(self._runs.note_change, change)
            self._try(self._stream.put_anomaly, change.anomaly)
            if change.what == "opened":
                self._try(self._report, change.anomaly)

    def _update_sensitivities(self, at: float) -> None:
        if at >= self._sensitivities_due:
            self._sensitivities_due = at + SENSITIVITIES_INTERVAL_S
            self._hub.publish(sensitivities=self._detection.sensitivities())

    def _publish(self) -> None:
        detection = self._detection
        anomalies = self.leases.shown((*detection.history, *detection.active))
        self._hub.publish(anomalies=anomalies, contexts=self._archive.contexts())

    def detector_statuses(
        self,
    ) -> tuple[Mapping[str, list[DetectorStatus]], tuple[Suppressed, ...]]:
        """Return the status of every detector by kind, and suppressed findings.

        May be called from any thread; waits for the current round.
        """
        with self._owner:
            return self._detection.statuses(), self._detection.suppressed

    def resolve(self, anomaly_id: str, who: str) -> Anomaly:
        """End an anomaly that only service ends, for the user ``who``. Raises Refused.

        May be called from any thread; waits for the current round.
        """
        with self._owner:
            changes = self._detection.resolve(anomaly_id, self._wall(), who)
            self._resolved += changes
        anomaly = changes[0].anomaly
        logger.warning(
            "%s of %s (%s) was resolved by %s", anomaly.kind, anomaly.device, anomaly.id, who
        )
        return anomaly

    def close(self) -> None:
        """Save everything for the next daemon, after the loop has stopped."""
        # A round or a disk that hangs must not keep the daemon from its end.
        if self._owner.acquire(timeout=CLOSE_TIMEOUT_S):
            run_all({"last-archive": self._archive.finish}, CLOSE_TIMEOUT_S)
            self._owner.release()

    def _poll_ranks(self, now: float, at: float) -> list[Record]:
        """Return the ranks' records, none if the rendezvous cannot be read."""
        try:
            records = self._ranks.poll(now, at)
        except OSError as error:
            self._rank_errors += 1
            self._rank_complaint.make("cannot read the rendezvous: %s", error)
            reason = f"{error.strerror}: {error.filename}"
            self._hub.publish_health(SourceHealth("ranks", False, reason, 0.0, self._rank_errors))
            return []
        except Exception as error:
            # Not the records of the other sources, which have been taken already.
            self._failure = self._failure or error
            return []
        self._rank_complaint.clear()
        taken_s = self._monotonic() - at
        self._hub.publish_health(SourceHealth("ranks", True, "", taken_s, self._rank_errors))
        return records

    def _report(self, anomaly: Anomaly) -> None:
        anomalies = self._hub.metrics.counter("anomalies_total")
        anomalies.labels(anomaly.kind, anomaly.severity).inc()
        level = logging.INFO if anomaly.severity == "info" else logging.WARNING
        logger.log(level, "%s: %s", anomaly.kind, sentence(anomaly))
