"""The composition root: builds the daemon from its configuration and runs it."""

from __future__ import annotations

import logging
import os
import signal
import socket
import time
from collections.abc import Callable, MutableMapping
from dataclasses import replace
from pathlib import Path

from warpwatch._version import __version__
from warpwatch_capturing.store import Store
from warpwatch_daemon.agent.composition import (
    Capturing,
    RankLoad,
    bus_agent,
    enabled_sources,
    hub_of,
    uploads,
)
from warpwatch_daemon.agent.pipeline import WRITE_INTERVAL_S, Pipeline, telemetry_log
from warpwatch_daemon.api_client import socket_path
from warpwatch_daemon.config import Config, Reloading
from warpwatch_daemon.for_fleet.api import agent_routes
from warpwatch_daemon.for_fleet.record_stream import RecordStream
from warpwatch_daemon.history.archive import Archive
from warpwatch_daemon.history.runs import RunFiles, RunTable
from warpwatch_daemon.ranks.counts import Positions
from warpwatch_daemon.ranks.folder import RendezvousFolder, resolve
from warpwatch_daemon.ranks.inbox import GonePods
from warpwatch_daemon.ranks.source import RanksSource
from warpwatch_detection.engine import Detection
from warpwatch_devices.attribution.folders import folder_of
from warpwatch_devices.simulated import simulated_uuid
from warpwatch_devices.source import SourceContext
from warpwatch_exporters.prometheus import Options
from warpwatch_exporters.push import PushExporters
from warpwatch_runtime.files import allow_enough
from warpwatch_runtime.supervisor import Loop, Supervisor, run_all
from warpwatch_serving.server import Server, passed_by_systemd
from warpwatch_telemetry.captures import Capture
from warpwatch_telemetry.errors import WarpwatchError
from warpwatch_telemetry.state import State

logger = logging.getLogger(__name__)

# How often the rings are read: a step is known within a fifth of a second.
POLL_INTERVAL_S = 0.2
# The pipeline's interval while a capture runs: a rank answers within a step.
HURRY_INTERVAL_S = 0.02
# These writers are woken if they have work.
ARCHIVE_INTERVAL_S = 5.0
POSITIONS_INTERVAL_S = 5.0
SELF_INTERVAL_S = 1.0
# At its end the agent waits this long for a disk that may hang.
LAST_WRITES_TIMEOUT_S = 2.0
UPLOAD_INTERVAL_S = 5.0
RUNS_INTERVAL_S = 5.0
GONE_PODS_INTERVAL_S = 60.0
# Before the bus is tried again, after an error.
BUS_PAUSE_S = 5.0


class Daemon:
    """The agent, which implements ``for_fleet.api.Agent`` for HTTP."""

    def __init__(
        self,
        config: Config,
        config_path: Path | None,
        environ: MutableMapping[str, str] = os.environ,
    ) -> None:
        allow_enough()
        self._config = config
        self.supervisor = Supervisor()
        node = config.node or environ.get("NODE_NAME") or socket.gethostname()
        self.hub = hub_of(config, node)
        self.metrics = metrics = self.hub.metrics
        self._fatal = ""
        # Loops that are woken, or that hurry.
        self._loops: dict[str, Loop] = {}
        passed = passed_by_systemd(environ)
        self.server = Server(self, config.http, routes=agent_routes, passed=passed)
        path, inbox = resolve(config.rendezvous, environ, os.getuid())
        self.folder = RendezvousFolder(path, inbox, __version__)
        self._known_pods = self.hub.pods if folder_of(config.attribution.pod_logs) else None
        store = Store(config.store)
        self._positions, self.ranks = self._rank_source(store.path)
        self.captures = Capturing(
            config, store, self.folder, self.ranks, self.hub, node, self._hurry
        )
        self.reloading = Reloading(config, config_path, environ, self.captures.policy, metrics)
        service = self.captures.service
        self.runs = RunTable(RunFiles(store.path), self.hub, node)
        self._upload = uploads(config, store, service, self.runs, metrics, node, environ)
        detection = Detection(config.detection, config.anomalies)
        self.archive = self._make_archive(store.path, detection)
        self._log = telemetry_log(config, metrics)
        self._stream = RecordStream()
        self.pipeline = Pipeline(
            self.hub, self.ranks, detection, service, self.captures.triggers,
            self.captures.baselines, self.archive, self._stream, self._log, self.runs,
        )  # fmt: skip
        self._push_exporters = self._exporters(node)
        self.sources = enabled_sources(config, self._context())
        self._bus = bus_agent(config, node, self._stream, self.server.app, metrics)
        # What HTTP asks.
        self.state = self.overview = self.exported = self.hub.state
        self.lease = self.pipeline.leases.acquire
        self.request_capture, self.prepare_capture = service.request, service.prepare
        self.receive_alerts = self.captures.alerts.receive
        self.capture_file = service.register.file
        self.anomaly, self.resolve_anomaly = self.archive.find, self.pipeline.resolve
        self.detector_statuses = self.pipeline.detector_statuses
        self.run_summaries = self.runs.all

    def _rank_source(self, state_folder: Path) -> tuple[Positions, RanksSource]:
        rejected = self.hub.metrics.counter("rendezvous_rejected_total")
        positions = Positions(
            state_folder, lambda: rejected.labels("not_saved").inc(), self._waking("positions")
        )
        return positions, RanksSource(
            self.folder,
            positions,
            self._config.detection.hang.stopped_after_s,
            lambda reason: rejected.labels(reason).inc(),
            known_pods=self._known_pods,
        )

    def _make_archive(self, folder: Path, detection: Detection) -> Archive:
        lost = self.metrics.counter("anomaly_store_errors_total")
        return Archive(
            folder, detection, lambda what: lost.labels(what).inc(), self._waking("archive")
        )

    def _exporters(self, node: str) -> PushExporters:
        public_url = self._config.http.public_url_of(node)
        return PushExporters(
            self._config.exporters, node, "warpwatch", public_url, self.metrics, self.hub.state,
            self._own_state,
        )  # fmt: skip

    def _context(self) -> SourceContext:
        return SourceContext(
            load_of=RankLoad(self.hub.ranks, simulated_uuid),
            devices=self.hub.devices,
            counters_wanted=self.captures.counters_wanted,
            fail=self._fail,
        )

    def _bind_locally(self) -> None:
        """Bind the socket under the lock of the folder, so that a running daemon keeps its own."""
        path = socket_path(self.folder.path)
        try:
            self.server.bind_locally(path)
        except OSError as error:
            logger.warning("no socket %s, so commands need a token: %s", path, error.strerror)

    # --- running ---

    def run(self) -> None:
        """Serve until SIGTERM or SIGINT. Raises WarpwatchError where only a restart can help."""
        self._start()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self._stop())
        signal.signal(signal.SIGHUP, lambda *_: self.reloading.request())
        if not self.server.trouble:
            logger.info("listening on %s:%d", *self.server.address)
        logger.info("watching ranks in %s", self.folder.path)
        self._bind_locally()
        try:
            self.server.run()
        finally:
            self._close()
        if self._fatal:
            raise WarpwatchError(self._fatal)

    def _stop(self) -> None:
        self._stream.close()
        self.server.stop()

    def _fail(self, reason: str) -> None:
        self._fatal = reason
        self._stop()

    def _start(self) -> None:
        every = self.supervisor.every
        self.metrics.read("loop_failures_total", self.supervisor.failures)
        self.metrics.read("loop_duration_seconds", self.supervisor.durations_s)
        self._loops = {
            "pipeline": every("pipeline", POLL_INTERVAL_S, self.pipeline.step),
            "archive": every("archive", ARCHIVE_INTERVAL_S, self.archive.write),
            "positions": every("positions", POSITIONS_INTERVAL_S, self._positions.write),
        }
        if self._log is not None:
            every("telemetry-log", WRITE_INTERVAL_S, self._log.write)
        every("self", SELF_INTERVAL_S, self.reloading.advance)
        self.captures.start(self.supervisor)
        known_pods = self._known_pods or (lambda: None)
        gone = GonePods(self.folder, known_pods, self.ranks.idle_pods)
        every("gone-pods", GONE_PODS_INTERVAL_S, lambda: gone.sweep(time.monotonic()))
        self._push_exporters.start(self.supervisor)
        every("runs", RUNS_INTERVAL_S, self.runs.write)
        if self._upload is not None:
            every("uploads", UPLOAD_INTERVAL_S, self._upload)
        if self._bus is not None:
            every("bus", BUS_PAUSE_S, self._bus.run)
        for source in self.sources:
            source.start(self.supervisor, self.hub)

    def _close(self) -> None:
        logger.info("stopping")
        if self._bus is not None:
            self._bus.close()
        self.supervisor.stop()
        self.captures.service.close()
        self.pipeline.close()
        self.ranks.close()
        last_writes = {
            "positions": self._positions.write,
            "runs": lambda: self.runs.close(time.time()),
        }
        if self._log is not None:
            last_writes["telemetry-log"] = self._log.write
        run_all(last_writes | self._push_exporters.last_words, LAST_WRITES_TIMEOUT_S)
        for source in self.sources:
            source.close()
        self.folder.close()

    def _waking(self, name: str) -> Callable[[], None]:
        """Return a function that wakes the loop once it runs."""
        return lambda: self._loops[name].wake() if name in self._loops else None

    def _hurry(self, busy: bool) -> None:
        loop = self._loops.get("pipeline")
        if loop is None:
            return
        interval_s = HURRY_INTERVAL_S if busy else POLL_INTERVAL_S
        if loop.interval_s != interval_s:
            loop.interval_s = interval_s
            if busy:
                loop.wake()

    # --- what HTTP asks ---

    async def prepare(self, path: str) -> None:
        """Fetch nothing: the node is all there is."""

    def _own_state(self) -> State:
        """Return the state without anomalies and captures that a fleet reports."""
        state, is_of_fleet = self.hub.state(), self.pipeline.leases.is_of_fleet
        return replace(
            state,
            anomalies=tuple(one for one in state.anomalies if not is_of_fleet(one)),
            captures=tuple(one for one in state.captures if not one.of_fleet),
        )

    def records(self) -> RecordStream:
        return self._stream

    def exposition(self) -> Options:
        configured = self._config.exporters.prometheus
        return Options(
            inline_workloads=configured.workload_labels == "inline",
            dcgm_names=configured.dcgm_names,
            profile=configured.profile,
        )

    def missing(self) -> tuple[str, ...]:
        # While the kubelet is away, attribution is known with its age.
        health = (health for health in self.hub.health() if health.name != "attribution")
        down = [health for health in health if not health.up]
        unread = (f"{health.name}: {health.reason}" for health in down)
        return (*unread, *self.archive.problems())

    def cancel_capture(self, name: str) -> Capture | None:
        return self.captures.service.cancel(name, "cancelled by the fleet")
