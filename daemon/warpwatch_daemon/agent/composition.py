"""Builds the agent's parts from the configuration; what is off is not even imported."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from starlette.types import ASGIApp

from warpwatch._version import __version__
from warpwatch_capturing.alerts import AlertRequests
from warpwatch_capturing.policy import Disk, Policy
from warpwatch_capturing.register import CaptureRegister
from warpwatch_capturing.regular import Baseline, RegularCaptures
from warpwatch_capturing.service import CaptureService
from warpwatch_capturing.store import Store
from warpwatch_capturing.triggers import Triggers
from warpwatch_daemon.config import Config
from warpwatch_daemon.for_fleet.record_stream import RecordStream
from warpwatch_daemon.history.runs import RunTable, RunUploads
from warpwatch_daemon.participants import stacks
from warpwatch_daemon.participants.local_ranks import LocalParticipants
from warpwatch_daemon.ranks.folder import RendezvousFolder
from warpwatch_daemon.ranks.inbox import Inboxes
from warpwatch_daemon.ranks.quotas import Quotas
from warpwatch_daemon.ranks.source import RanksSource
from warpwatch_daemon.state.hub import Hub
from warpwatch_devices.host import NETWORK_INTERVAL_S, NetworkSource
from warpwatch_devices.source import Source, SourceContext
from warpwatch_runtime.agent_metrics import AgentMetrics
from warpwatch_runtime.bus import check
from warpwatch_runtime.supervisor import Loop, Supervisor
from warpwatch_telemetry.captures import COUNTER_KINDS
from warpwatch_telemetry.state import RankKey, RankState

if TYPE_CHECKING:
    from warpwatch_daemon.for_fleet.bus import BusAgent


def hub_of(config: Config, node: str) -> Hub:
    """Make the hub, which trusts values for three missed intervals and a late one."""
    sources = config.sources
    # dcgm-exporter reads DCGM only every 30 s, and repeated values are not published again.
    intervals_s = {
        "nvml": sources.nvml.interval_s,
        "host": sources.host.interval_s,
        "processes": 5.0,
        "network": NETWORK_INTERVAL_S,
        "dcgm_exporter": 30.0,
    }
    stale_after_s = {name: 4 * interval_s for name, interval_s in intervals_s.items()}
    public_url = config.http.public_url_of(node)
    return Hub(4.0, by_source=stale_after_s, hostname=node, public_url=public_url)


def enabled_sources(config: Config, context: SourceContext) -> list[Source]:
    """Return the enabled sources; a disabled one is not even imported."""
    return [*_devices(config, context), *_host(config, context)]


def _devices(config: Config, context: SourceContext) -> Iterator[Source]:
    sources = config.sources
    if sources.nvml.enabled:
        from warpwatch_devices.nvml.source import NvmlSource
        from warpwatch_devices.xids import KernelLogSource, XidLedger

        ledger = XidLedger()
        yield NvmlSource(sources.nvml, context, ledger)
        if sources.kernel_log.enabled:
            yield KernelLogSource(ledger)
    if sources.simulated.enabled:
        from warpwatch_devices.simulated import SimulatedSource

        yield SimulatedSource(sources.simulated, context.load_of)
    if sources.dcgm.enabled:
        from warpwatch_devices.dcgm.source import DcgmSource

        yield DcgmSource(sources.dcgm, context)
    if sources.dcgm_exporter.url is not None:
        from warpwatch_devices.dcgm.exporter_source import DcgmExporterSource

        yield DcgmExporterSource(sources.dcgm_exporter, context)


def _host(config: Config, context: SourceContext) -> Iterator[Source]:
    sources = config.sources
    if sources.host.enabled:
        from warpwatch_devices.host import HostSource

        yield HostSource(sources.host)
        if not sources.simulated.enabled:
            yield NetworkSource(context)
    if sources.processes.enabled:
        from warpwatch_devices.processes import ProcessesSource

        yield ProcessesSource(context)
    attribution = config.attribution
    if {attribution.kubelet_socket, attribution.slurm, attribution.pod_logs} != {"off"}:
        from warpwatch_devices.attribution.source import AttributionSource

        yield AttributionSource(attribution, context)


RETENTION_INTERVAL_S = 60.0
DISK_INTERVAL_S = 10.0
# A finisher with work is woken.
FINISH_INTERVAL_S = 5.0
INBOXES_INTERVAL_S = 1.0
# For uncollected files of captures that this daemon no longer has.
SWEEP_AFTER_S = 3600.0


class Capturing:
    """Store, policy, participants, triggers and their loops.

    ``node``: its name in alerts. ``hurry`` gets whether a capture runs.
    """

    def __init__(
        self,
        config: Config,
        store: Store,
        folder: RendezvousFolder,
        ranks: RanksSource,
        hub: Hub,
        node: str,
        hurry: Callable[[bool], None],
    ) -> None:
        self._hub = hub
        self._ranks = ranks
        self.disk = Disk(store.path)
        self._quotas = Quotas(folder, config.rendezvous, ranks.reject)
        self.policy = Policy(config.triggers, self.disk, excess=self._quotas.excess)
        self.service = CaptureService(
            self.policy, CaptureRegister(store, hub), LocalParticipants(self.policy, ranks), hub,
            hurry, self._wake,
        )  # fmt: skip
        self.triggers = Triggers(self.service, ranks.targets, hub)
        self.baselines = RegularCaptures(Baseline(self.service, hub), self.service)
        self.alerts = AlertRequests(
            lambda: hub.state() if hub.ranks_known() else None,
            self.service.request,
            self.service.register,
            lambda: self.policy.config.recipes,
            ranks.targets,
            node,
        )
        self._inboxes = Inboxes(folder, ranks.served_pods, ranks.reject)
        self._finisher_loops: tuple[Loop, ...] = ()

    def counters_wanted(self) -> bool:
        """Return whether a capture uses the GPU's performance counters."""
        return any(
            capture.request.kind in COUNTER_KINDS and capture.outcome is None
            for capture in self._hub.captures()
        )

    def start(self, supervisor: Supervisor) -> None:
        every, inboxes = supervisor.every, self._inboxes
        self._finisher_loops = (
            every("captures", FINISH_INTERVAL_S, self.service.finish),
            every("stacks", FINISH_INTERVAL_S, self.service.finish_urgent),
        )
        every("retention", RETENTION_INTERVAL_S, self.service.retain)
        every("inboxes", INBOXES_INTERVAL_S, self._tend_inboxes)
        every("sweep", RETENTION_INTERVAL_S, lambda: inboxes.sweep(SWEEP_AFTER_S, time.time()))
        every("disk", DISK_INTERVAL_S, self.disk.measure)
        every("quotas", DISK_INTERVAL_S, self._quotas.measure)

    def _tend_inboxes(self) -> None:
        self._inboxes.tend(time.monotonic())
        for ring, folder in self._ranks.take_ended():
            stacks.remove_pipe(folder.inbox, ring.name, ring.owner_uid)

    def _wake(self) -> None:
        for loop in self._finisher_loops:
            loop.wake()


def bus_agent(
    config: Config, node: str, stream: RecordStream, app: ASGIApp, metrics: AgentMetrics
) -> BusAgent | None:
    """Return the agent's part on the bus, or None if there is no bus. Raises UsageError."""
    if config.bus.url is None:
        return None
    from warpwatch_daemon.for_fleet.bus import BusAgent

    check(config.bus)
    return BusAgent(config.bus, node, __version__, stream, app, metrics)


def uploads(
    config: Config,
    store: Store,
    service: CaptureService,
    runs: RunTable,
    metrics: AgentMetrics,
    node: str,
    environ: Mapping[str, str],
) -> Callable[[], None] | None:
    """Return a loop's work for the remote store, or None if there is none. Raises UsageError."""
    url = config.remote_store.url
    if url is None:
        return None
    from warpwatch_capturing.remote_store import RemoteStore, Uploads

    remote = RemoteStore(url, environ)
    register, is_settled = service.register, service.is_settled
    of_captures = Uploads(remote, store.path, register, is_settled, metrics, node)
    of_runs = RunUploads(remote, runs, metrics)

    def advance() -> None:
        of_captures.advance()
        of_runs.advance()

    return advance


# A rank that finished no step for this long does not load its device.
IDLE_AFTER_S = 3.0


class RankLoad:
    """The load by device. ``ranks``: all current ranks; ``uuid_of``: the UUID of an index."""

    def __init__(
        self,
        ranks: Callable[[], Iterable[RankState]],
        uuid_of: Callable[[int], str],
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._ranks = ranks
        self._uuid_of = uuid_of
        self._wall = wall
        self._seen: dict[RankKey, tuple[float, float]] = {}

    def __call__(self, index: int) -> float | None:
        """Return the share of time that the device computes; None if it has no rank."""
        uuid = self._uuid_of(index)
        ranks = [rank for rank in self._ranks() if rank.device == uuid]
        return max((self._share(rank) for rank in ranks), default=None)

    def _share(self, rank: RankState) -> float:
        """Return one minus the share of waiting in the newest steps."""
        if rank.last_step_time is None or self._wall() - rank.last_step_time > IDLE_AFTER_S:
            return 0.0
        waited_s = sum(rank.phases_s.get(name, 0.0) for name in ("data_wait", "comm"))
        key = rank.key
        before_s, before_time = self._seen.get(key, (waited_s, 0.0))
        if rank.last_step_time <= before_time:
            return 0.9
        self._seen[key] = (waited_s, rank.last_step_time)
        elapsed_s = rank.last_step_time - before_time
        return min(0.97, max(0.05, 0.97 * (1 - (waited_s - before_s) / elapsed_s)))
