"""The process of a fleet: finds and follows agents, evaluates jobs, serves HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from warpwatch import rendezvous
from warpwatch._version import __version__
from warpwatch_capturing.alerts import AlertRequests
from warpwatch_capturing.register import CaptureRegister
from warpwatch_capturing.regular import RegularCaptures
from warpwatch_capturing.triggers import MAX_TRIES, Triggers
from warpwatch_detection.anomalies.register import Change
from warpwatch_detection.anomalies.tracked import Suppressed
from warpwatch_detection.detector import DetectorStatus
from warpwatch_exporters.prometheus import Options
from warpwatch_exporters.push import PushExporters
from warpwatch_fleet.agent_link import AgentError
from warpwatch_fleet.captures.requests import (
    FleetBoard,
    FleetCaptures,
    FleetMetrics,
    Schedule,
    open_store,
)
from warpwatch_fleet.config import FleetConfig, FleetFile
from warpwatch_fleet.kubernetes.tasks import Kubernetes
from warpwatch_fleet.page import heatmap, nodes
from warpwatch_fleet.runs import RunPart, Runs
from warpwatch_fleet.series import Series, measure_process
from warpwatch_fleet.source import FleetSource, HttpSource
from warpwatch_runtime.agent_metrics import AgentMetrics
from warpwatch_runtime.files import allow_enough
from warpwatch_runtime.supervisor import Loop, Supervisor
from warpwatch_serving.access import Keys
from warpwatch_serving.backend import ApiBackend
from warpwatch_serving.config import HttpConfig
from warpwatch_serving.page.endpoint import PageEndpoint
from warpwatch_serving.server import Server, passed_by_systemd
from warpwatch_telemetry.alerts import Alert, AlertAnswer
from warpwatch_telemetry.anomalies import Anomaly, AnomalyContext, sentence
from warpwatch_telemetry.captures import Capture, CaptureRequest
from warpwatch_telemetry.errors import Refused
from warpwatch_telemetry.jobs import JobId, RunSummary
from warpwatch_telemetry.state import RankState, State

logger = logging.getLogger(__name__)

EVALUATE_INTERVAL_S = 0.5
LEASE_LOOK_S = 2.0
SCHEDULE_INTERVAL_S = 30.0
RETAIN_INTERVAL_S = 60.0
UPLOAD_INTERVAL_S = 1.0
# A finisher that has something to do is woken.
FINISH_INTERVAL_S = 5.0
# How long the end waits for what is on its way.
STOP_TIMEOUT_S = 5.0
_NO_RELOAD = "SIGHUP ignored: a fleet does not reload its configuration; restart it for a new one"


class _FleetHttp(HttpConfig):
    section = "fleet"


def _http_config(own: FleetConfig) -> HttpConfig:
    """Return the fleet's own keys as the section `http`, which an agent has."""
    return _FleetHttp(
        listen=own.listen,
        probe_listen=own.probe_listen,
        token_file=own.token_file,
        metrics_token=own.metrics_token,
        web_config=own.web_config,
    )


class FleetPage(PageEndpoint):
    """The page of a fleet: the agent's parts, with jobs and nodes as heat maps."""

    templates = (Path(__file__).parent / "page" / "templates", *PageEndpoint.templates)
    name = "fleet.html"

    def __init__(self, fleet: ApiBackend) -> None:
        super().__init__(fleet)
        self.modules = {"heatmap": heatmap, "nodes": nodes}


class Fleet:
    """Implements ``serving.backend.ApiBackend``."""

    _trigger_tries = MAX_TRIES

    def __init__(self, config: FleetFile) -> None:
        """Build the parts. Raises UsageError where the configuration cannot be used."""
        allow_enough()
        own = config.fleet
        self._hostname = socket.gethostname()
        self._public_url = own.public_url or ""
        self.metrics: AgentMetrics = FleetMetrics()
        self._source = self._source_of(config)
        self._cluster = self._source.view
        self._supervisor = Supervisor()
        self.metrics.read("loop_failures_total", self._supervisor.failures)
        self.metrics.read("loop_duration_seconds", self._supervisor.durations_s)
        self._board = FleetBoard(self.metrics)
        self._register = CaptureRegister(open_store(config), self._board)
        self._finisher_loops: tuple[Loop, ...] = ()
        self._schedule_loops: tuple[Loop, ...] = ()
        self.captures = FleetCaptures(
            self._cluster, self._source.links, config.triggers, self._register, self._board,
            self._wake,
        )  # fmt: skip
        self._triggers = Triggers(self.captures, None, self._board, self._trigger_tries)
        self._has_schedules = bool(own.schedules)
        schedule = Schedule(own.schedules, self._cluster)
        self._schedules = RegularCaptures(schedule, self.captures)
        # Changes of anomalies that the triggers have not seen yet.
        self._changes: list[Change] = []
        self._kubernetes = Kubernetes(own, self._cluster, self.captures, self.metrics, self._source)
        self._alerts = AlertRequests(
            self._complete_state, self.request_capture, self._register,
            recipes=lambda: config.triggers.recipes, targets=lambda job: {},
        )  # fmt: skip
        self._upload = self._uploads(config.remote_store.url)
        self._ended: asyncio.Event
        self.runs = Runs(self._run_parts)
        source = self._source
        Series(self.metrics, source.view, time.time, source.partitions, source.evaluated)
        measure_process(self.metrics)
        node = config.node or self._hostname
        self.push_exporters = PushExporters(
            config.exporters, node, "warpwatch-fleet", self._public_url, self.metrics,
            self.exported, self.exported,
        )  # fmt: skip
        self.server = Server(
            self, _http_config(own), page=FleetPage(self), passed=passed_by_systemd(os.environ),
            sessions=self._sessions(),
        )  # fmt: skip

    def _source_of(self, config: FleetFile) -> FleetSource:
        unsaved = self.metrics.counter("anomaly_store_errors_total").labels("snapshot")
        return HttpSource(config, f"{self._hostname}/{config.fleet.listen}", unsaved.inc)

    def _sessions(self) -> Keys | None:
        """Return None: no other process accepts the sessions of this one."""
        return None

    # --- running ---

    def run(self) -> None:
        """Serve until SIGTERM or SIGINT."""
        # A daemon thread: NATS' library may never end an attempt to connect, as asyncio.wait_for
        # loses a cancellation if the server refuses at that moment.
        following = threading.Thread(
            target=lambda: asyncio.run(self._follow_all()), name="follow", daemon=True
        )
        following.start()
        self._start_loops()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self.server.stop())
        signal.signal(signal.SIGHUP, lambda *_: logger.warning(_NO_RELOAD))
        if not self.server.trouble:
            logger.info("listening on %s:%d", *self.server.address)
        self._bind_locally()
        try:
            self.server.run()
        finally:
            logger.info("stopping")
            self._stop()
            following.join(STOP_TIMEOUT_S)
            self._supervisor.stop()
            self.push_exporters.close()

    def _bind_locally(self) -> None:
        """Serve a Unix socket next to the first rendezvous folder that is writable."""
        for candidate in rendezvous.candidates(os.environ, os.getuid()):
            folder = Path(candidate.path)
            path = folder.with_name(f"{folder.name}-fleet-api") / "api.sock"
            try:
                self.server.bind_locally(path)
            except OSError as error:
                logger.info("no socket %s: %s", path, error.strerror)
            else:
                return
        logger.warning("no socket, so the web page needs the token")

    def _start_loops(self) -> None:
        every, service = self._supervisor.every, self.captures.service
        self.push_exporters.start(self._supervisor)
        self._finisher_loops = (
            every("captures", FINISH_INTERVAL_S, service.finish),
            every("stacks", FINISH_INTERVAL_S, service.finish_urgent),
        )
        every("retention", RETAIN_INTERVAL_S, service.retain)
        every("triggers", EVALUATE_INTERVAL_S, self._advance_triggers)
        if self._has_schedules:
            schedules = every("schedules", SCHEDULE_INTERVAL_S, self._advance_schedules)
            self._schedule_loops = (schedules,)
        if self._upload is not None:
            every("uploads", UPLOAD_INTERVAL_S, self._upload)

    def _wake(self) -> None:
        for loop in self._finisher_loops:
            loop.wake()

    def _stop(self) -> None:
        # No regular capture starts that nobody would follow.
        for schedules in self._schedule_loops:
            schedules.stop()
        loop = self.captures.loop
        if loop is not None:
            with contextlib.suppress(RuntimeError):  # it has ended by itself
                loop.call_soon_threadsafe(self._ended.set)

    async def _follow_all(self) -> None:
        self._ended = asyncio.Event()
        self.captures.loop = asyncio.get_running_loop()
        loops = [asyncio.create_task(self._follow())]
        loops.append(asyncio.create_task(self._kubernetes.run()))
        await self._ended.wait()
        for task in loops:
            task.cancel()
        await asyncio.gather(*loops, return_exceptions=True)
        await self._source.close()

    async def _follow(self) -> None:
        try:
            await self._source.start()
        except Exception:
            logger.exception("nothing is followed")
            raise
        own = (EVALUATE_INTERVAL_S, self._evaluate), (LEASE_LOOK_S, self._renew_leases)
        await asyncio.gather(*(_every(*one) for one in (*self._source.rounds, *own)))

    # --- evaluation ---

    async def _evaluate(self) -> None:
        changes = await self._source.evaluate()
        changed = {one.anomaly.job_id for one in changes if one.what != "updated"}
        opened = [change.anomaly for change in changes if change.what == "opened"]
        for anomaly in opened:
            self._report(anomaly)
        with self._cluster.lock:
            self._changes += changes
        if opened:
            await self._renew_leases(changed)

    def _report(self, anomaly: Anomaly) -> None:
        raised = self.metrics.counter("anomalies_total")
        raised.labels(anomaly.kind, anomaly.severity).inc()
        logger.warning("%s: %s", anomaly.kind, sentence(anomaly))

    async def _renew_leases(self, changed: Collection[JobId | None] = ()) -> None:
        with self._cluster.lock:
            wanted = self._cluster.leases_due(time.time(), changed)
        results = await asyncio.gather(
            *(self._source.links.link(target).lease(job, raised) for target, job, raised in wanted),
            return_exceptions=True,
        )
        refused = [
            f"no lease of {job.name} from {target.address}, so that agent reports the job's "
            f"anomalies beside this fleet: {result}"
            for (target, job, _), result in zip(wanted, results, strict=True)
            if isinstance(result, AgentError | Refused)
        ]
        if refused:
            # All of them, while the bus is away.
            more = f" (and {len(refused) - 1} more)" if len(refused) > 1 else ""
            logger.warning("%s%s", refused[0], more)

    # --- captures ---

    def _advance_triggers(self) -> None:
        with self._cluster.lock:
            changes, self._changes = self._changes, []
        self._triggers.advance(time.time(), changes, ())

    def _advance_schedules(self) -> None:
        with self._cluster.lock:
            active = [one for one in self._cluster.anomalies() if one.end_time is None]
        self._schedules.advance(time.time(), active)

    def _uploads(self, url: str | None) -> Callable[[], None] | None:
        """Return the work of the loop that uploads captures, if there is a remote store."""
        if url is None:
            return None
        from warpwatch_capturing.remote_store import RemoteStore, Uploads

        return Uploads(
            RemoteStore(url), self._register.store.path, self._register,
            self.captures.is_settled, self.metrics, node="fleet",
        ).advance  # fmt: skip

    # --- what HTTP asks ---

    async def prepare(self, path: str) -> None:
        """Fetch nothing: one process has all there is."""

    def state(self) -> State:
        return replace(self.overview(), ranks=self._ranks())

    def _ranks(self) -> tuple[RankState, ...]:
        with self._cluster.lock:
            names, now, jobs = self._cluster.names(), time.time(), self._cluster.jobs.values()
            return tuple(rank for job in jobs for rank in job.ranks(names, now))

    def overview(self) -> State:
        with self._cluster.lock:
            now = time.time()
            return State(
                time=now,
                version=__version__,
                hostname=self._hostname,
                devices=tuple(one for node in self._cluster.agents() for one in node.devices()),
                sources=tuple(node.health(now) for node in self._cluster.agents()),
                jobs=tuple(job.state() for job in self._cluster.jobs.values()),
                anomalies=tuple(sorted(self._cluster.anomalies(), key=lambda one: one.time)),
                captures=self.captures.shown(),
                decisions=self._board.decisions,
                public_url=self._public_url,
            )

    def _complete_state(self) -> State | None:
        """Return the state, or None while not all agents have reported."""
        with self._cluster.lock:
            is_complete = self._cluster.is_heard()
        return self.state() if is_complete else None

    def exported(self) -> State:
        """Return what this fleet has found and captured.

        Ranks and devices are on the agents' own ``/metrics``, and agents report what they found.
        """
        with self._cluster.lock:
            own = tuple(one for one in self._cluster.anomalies() if one.judged_by == "fleet")
        return State(
            time=time.time(),
            version=__version__,
            hostname=self._hostname,
            anomalies=own,
            captures=tuple(self._register.all()),
            public_url=self._public_url,
        )

    def exposition(self) -> Options:
        return Options()

    def missing(self) -> tuple[str, ...]:
        """Return why the fleet is not ready. Lost agents are shown with their jobs instead."""
        return self._source.missing

    def request_capture(self, request: CaptureRequest) -> Capture:
        """Start a capture; may wait for an agent."""
        return self.captures.request(request)

    def receive_alerts(self, alerts: Sequence[Alert], own_name: str) -> list[AlertAnswer]:
        return self._alerts.receive(alerts)

    def capture_file(
        self, capture_id: str, name: str, owner: str | None
    ) -> Path | Iterator[bytes] | None:
        """Return a file of a capture; may wait for the agent that has it."""
        path = self._register.file(capture_id, name, owner)
        if path is not None and path.is_file():
            return path
        return self.captures.download(capture_id, name, owner)

    def anomaly(self, anomaly_id: str) -> tuple[Anomaly, AnomalyContext | None] | None:
        return None

    def run_summaries(self) -> Sequence[RunSummary]:
        return self.runs.all()

    def _run_parts(self) -> tuple[list[RunPart], dict[JobId, dict[str, int]]]:
        with self._cluster.lock:
            parts = [part for node in self._cluster.nodes.values() for part in node.runs()]
            return parts, {run: dict(counts) for run, counts in self._cluster.raised.items()}

    def detector_statuses(
        self,
    ) -> tuple[Mapping[str, Sequence[DetectorStatus]], Sequence[Suppressed]]:
        with self._cluster.lock:
            return self._cluster.detector_statuses()


async def _every(interval_s: float, work: Callable[[], Awaitable[None]]) -> None:
    while True:
        try:
            await work()
        except Exception:
            logger.exception("a round of %s failed", getattr(work, "__name__", work))
        await asyncio.sleep(interval_s)
