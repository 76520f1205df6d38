"""The composition root: builds the daemon from its configuration and runs it."""

from __future__ import annotations

import logging
import os
import signal
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from prometheus_client import CollectorRegistry

from warpwatch import rendezvous
from warpwatch._version import __version__
from warpwatch_daemon.agent import grafana
from warpwatch_daemon.agent.open_files import allow_enough
from warpwatch_daemon.agent.pipeline import Pipeline
from warpwatch_daemon.agent.reloading import Reloading
from warpwatch_daemon.agent.sources import enabled_sources
from warpwatch_daemon.agent.supervisor import Loop, Supervisor
from warpwatch_daemon.agent.telemetry_log import WRITE_INTERVAL_S, telemetry_log
from warpwatch_daemon.captures.alerts.alert_requests import AlertRequests, Answer
from warpwatch_daemon.captures.alerts.webhook import Alert
from warpwatch_daemon.captures.coordinator import Coordinator
from warpwatch_daemon.captures.disk import Disk
from warpwatch_daemon.captures.kineto.backend import LOOK_INTERVAL_S, KinetoBackend
from warpwatch_daemon.captures.kineto.pollers import Pollers
from warpwatch_daemon.captures.kineto.process_facts import read_facts
from warpwatch_daemon.captures.kineto.server import PAUSE_S, KinetoServer
from warpwatch_daemon.captures.policy import Policy
from warpwatch_daemon.captures.store import Store
from warpwatch_daemon.captures.triggers.decisions import Triggers
from warpwatch_daemon.config.sections import Config
from warpwatch_daemon.history.archive import Archive
from warpwatch_daemon.http.server import Server
from warpwatch_daemon.ranks.folder import RendezvousFolder, resolve
from warpwatch_daemon.ranks.inboxes import Inboxes
from warpwatch_daemon.ranks.load import RankLoad
from warpwatch_daemon.ranks.source import RanksSource
from warpwatch_daemon.state.hub import Hub
from warpwatch_detection.anomalies.register_state import Suppressed
from warpwatch_detection.detector import DetectorStatus
from warpwatch_detection.engine import Detection
from warpwatch_devices.call_guard import run_all
from warpwatch_devices.simulated.source import simulated_uuid
from warpwatch_devices.source import Surroundings
from warpwatch_exporters.prometheus import Options
from warpwatch_telemetry.anomalies import Anomaly, AnomalyContext
from warpwatch_telemetry.captures import COUNTER_KINDS, Capture, CaptureRequest
from warpwatch_telemetry.errors import WarpwatchError
from warpwatch_telemetry.state import State

logger = logging.getLogger(__name__)

# How often the rings are read: a step is known within a fifth of a second.
POLL_INTERVAL_S = 0.2
# How often the pipeline looks while a capture runs: a rank answers within a step.
HURRY_INTERVAL_S = 0.02
RETENTION_INTERVAL_S = 60.0
DISK_INTERVAL_S = 10.0
# A finisher that has something to do is woken.
FINISH_INTERVAL_S = 5.0
# So is the archive's writer.
ARCHIVE_INTERVAL_S = 5.0
SELF_INTERVAL_S = 1.0
INBOXES_INTERVAL_S = 1.0
# Files that were never collected: of captures that this daemon no longer knows.
SWEEP_AFTER_S = 3600.0
# How long the end waits for a disk that may hang.
LOG_CLOSE_TIMEOUT_S = 2.0
GRAFANA_INTERVAL_S = 2.0


class Daemon:
    """Implements ``http.agent.Agent``."""

    def __init__(
        self, config: Config, config_path: Path | None, environ: Mapping[str, str] = os.environ
    ) -> None:
        allow_enough()
        self._config = config
        self._environ = environ
        self.supervisor = Supervisor()
        self.hub = _hub(config)
        metrics = self.hub.metrics
        metrics.read("loop_failures_total", self.supervisor.failures)
        metrics.read("loop_duration_seconds", self.supervisor.durations_s)
        self._fatal = ""
        self.server = Server(self, config.http)
        self.server.bind()
        path, inbox = resolve(config.rendezvous, environ, os.getuid())
        self.folder = RendezvousFolder(path, inbox, __version__)
        self.store = Store(config.store)
        rejected = metrics.counter("rendezvous_rejected_total")
        self.ranks = RanksSource(
            self.folder,
            config.detection.hang.stopped_after_s,
            lambda reason: rejected.labels(reason).inc(),
        )
        self.inboxes = Inboxes(self.folder, self.ranks.served_pods, self.ranks.reject)
        self.disk = Disk(self.store.path)
        self.policy = Policy(config.triggers, self.disk)
        self.reloading = Reloading(config, config_path, environ, self.policy, metrics)
        pollers = Pollers(lambda sender: read_facts(sender.pid, sender.uid))
        self.kineto = self._kineto_server(pollers)
        self._kineto_backend = KinetoBackend(
            self.policy, Disk(self.folder.inbox), pollers, self.ranks.targets
        )
        self.coordinator = self._coordinate()
        node = environ.get("NODE_NAME") or socket.gethostname()
        self.alerts = AlertRequests(self.coordinator, self.ranks, self.hub, node)
        self._grafana = grafana.follower(config, node, metrics)
        detection = Detection(config.detection, config.anomalies)
        self.archive = Archive(
            self.store.path,
            config.anomalies,
            detection,
            lambda what: metrics.counter("anomaly_store_errors_total").labels(what).inc(),
            self._wake_archive,
        )
        self._archive_loop: Loop | None = None
        self._log = telemetry_log(config, metrics)
        self.pipeline = Pipeline(
            self.hub,
            self.ranks,
            detection,
            self.coordinator,
            Triggers(self.coordinator, self.ranks, self.hub),
            self.archive,
            self._log,
        )
        self.sources = enabled_sources(config, self._surroundings())
        self._pipeline_loop: Loop | None = None
        self._finisher_loops: tuple[Loop, ...] = ()

    def _surroundings(self) -> Surroundings:
        return Surroundings(
            load_of=RankLoad(self.hub.ranks, simulated_uuid),
            devices=self.hub.devices,
            counters_wanted=self._counters_wanted,
            fail=self._fail,
        )

    def _coordinate(self) -> Coordinator:
        return Coordinator(
            self.policy,
            self.store,
            self.ranks,
            self.hub,
            self._hurry,
            self._wake_finisher,
            backends=(self._kineto_backend,),
        )

    def _kineto_server(self, pollers: Pollers) -> KinetoServer | None:
        """None where it is switched off or there can be no socket."""
        if not self._config.rendezvous.kineto:
            return None
        rejected = self.hub.metrics.counter("rendezvous_rejected_total")
        try:
            return KinetoServer(
                self.folder.path / rendezvous.KINETO,
                pollers,
                lambda reason: rejected.labels(f"kineto_{reason}").inc(),
            )
        except OSError as error:
            logger.warning("no socket for Kineto in %s: %s", self.folder.path, error.strerror)
            return None

    # --- running ---

    def run(self) -> None:
        """Serve until SIGTERM or SIGINT. Raises WarpwatchError where only a restart can help."""
        self._start()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self.server.stop())
        signal.signal(signal.SIGHUP, lambda *_: self.reloading.ask())
        host, port = self.server.address
        logger.info("listening on %s:%d, rendezvous %s", host, port, self.folder.path)
        try:
            self.server.run()
        finally:
            self._close()
        if self._fatal:
            raise WarpwatchError(self._fatal)

    def _fail(self, reason: str) -> None:
        self._fatal = reason
        self.server.stop()

    def _counters_wanted(self) -> bool:
        return any(
            capture.request.kind in COUNTER_KINDS and capture.outcome is None
            for capture in self.hub.captures()
        )

    def _start(self) -> None:
        every = self.supervisor.every
        self._pipeline_loop = every("pipeline", POLL_INTERVAL_S, self.pipeline.step)
        self._finisher_loops = (
            every("captures", FINISH_INTERVAL_S, self.coordinator.finish),
            every("stacks", FINISH_INTERVAL_S, self.coordinator.finish_urgent),
        )
        self._archive_loop = every("archive", ARCHIVE_INTERVAL_S, self.archive.write)
        if self._log is not None:
            every("telemetry-log", WRITE_INTERVAL_S, self._log.write)
        every("retention", RETENTION_INTERVAL_S, self.coordinator.retain)
        every("inboxes", INBOXES_INTERVAL_S, lambda: self.inboxes.tend(time.monotonic()))
        every("sweep", RETENTION_INTERVAL_S, lambda: self.inboxes.sweep(SWEEP_AFTER_S, time.time()))
        every("disk", DISK_INTERVAL_S, self.disk.measure)
        every("self", SELF_INTERVAL_S, self._observe_self)
        if self.kineto is not None:
            every("kineto", PAUSE_S, self.kineto.serve)
            every("inbox-disk", DISK_INTERVAL_S, self._kineto_backend.measure_disk)
            every("kineto-traces", LOOK_INTERVAL_S, self._kineto_backend.look)
        follower = self._grafana
        if follower is not None:
            every("grafana", GRAFANA_INTERVAL_S, lambda: follower.advance(self.hub.state()))
        for source in self.sources:
            source.start(self.supervisor, self.hub)

    def _close(self) -> None:
        logger.info("stopping")
        if self.kineto is not None:
            self.kineto.stop()
        self.supervisor.stop()
        self.coordinator.close()
        self.pipeline.close()
        if self._log is not None:
            run_all({"telemetry-log": self._log.write}, LOG_CLOSE_TIMEOUT_S)
        if self.kineto is not None:
            self.kineto.close()
        for source in self.sources:
            source.close()
        self.ranks.close()
        self.folder.close()

    def _wake_archive(self) -> None:
        if self._archive_loop is not None:
            self._archive_loop.wake()

    def _wake_finisher(self) -> None:
        for loop in self._finisher_loops:
            loop.wake()

    def _hurry(self, busy: bool) -> None:
        loop = self._pipeline_loop
        if loop is None:
            return
        interval_s = HURRY_INTERVAL_S if busy else POLL_INTERVAL_S
        if loop.interval_s != interval_s:
            loop.interval_s = interval_s
            if busy:
                loop.wake()

    def _observe_self(self) -> None:
        """What jobs Kineto sees; also where a reload is carried out."""
        self.reloading.advance()
        self.hub.publish_kineto_jobs(self._kineto_backend.states())

    # --- what HTTP asks ---

    def state(self) -> State:
        return self.hub.state()

    def registry(self) -> CollectorRegistry:
        return self.hub.metrics.registry

    def exposition(self) -> Options:
        configured = self._config.exporters.prometheus
        return Options(
            inline_workloads=configured.workload_labels == "inline",
            dcgm_names=configured.dcgm_names,
            node=self._environ.get("NODE_NAME", ""),
        )

    def missing(self) -> tuple[str, ...]:
        # Whose work runs where is known with its age while the kubelet is away.
        health = (health for health in self.hub.health() if health.name != "attribution")
        down = [health for health in health if not health.up]
        return tuple(f"{health.name}: {health.reason}" for health in down)

    def request_capture(self, request: CaptureRequest) -> Capture:
        return self.coordinator.request(request)

    def receive_alerts(
        self, alerts: Sequence[Alert], own_names: Iterable[str], peers: frozenset[str]
    ) -> list[Answer]:
        return self.alerts.receive(alerts, own_names, peers)

    def count_alerts(self, outcome: str, count: int) -> None:
        self.hub.metrics.counter("alerts_received_total").labels(outcome).inc(count)

    def capture_file(self, capture_id: str, name: str) -> Path | None:
        return self.coordinator.file(capture_id, name)

    def anomaly(self, anomaly_id: str) -> tuple[Anomaly, AnomalyContext | None] | None:
        return self.archive.find(anomaly_id)

    def detector_statuses(
        self,
    ) -> tuple[Mapping[str, Sequence[DetectorStatus]], Sequence[Suppressed]]:
        return self.pipeline.detector_statuses()

    def count_request(self, code: int) -> None:
        self.hub.metrics.counter("http_requests_total").labels(code).inc()


def _hub(config: Config) -> Hub:
    """What was not read again is believed for three missed intervals, and one for a late one."""
    sources = config.sources
    intervals_s = {
        name: getattr(sources, name).interval_s
        for name in ("nvml", "simulated", "host", "processes", "dcgm", "dcgm_exporter")
    }
    # dcgm-exporter reads DCGM every 30 s only, and what it says again is not published again.
    intervals_s["dcgm_exporter"] = max(30.0, intervals_s["dcgm_exporter"])
    stale_after_s = {name: 4 * interval_s for name, interval_s in intervals_s.items()}
    return Hub(4.0, by_source=stale_after_s)
