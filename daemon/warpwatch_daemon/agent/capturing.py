"""What captures are made of, put together: store, policy, back ends, who asks, and their loops."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from warpwatch import rendezvous
from warpwatch_daemon.agent.supervisor import Loop, Supervisor
from warpwatch_daemon.captures.alerts.alert_requests import AlertRequests
from warpwatch_daemon.captures.coordinator import Coordinator
from warpwatch_daemon.captures.disk import Disk
from warpwatch_daemon.captures.kineto.backend import LOOK_INTERVAL_S, KinetoBackend
from warpwatch_daemon.captures.kineto.pollers import Pollers
from warpwatch_daemon.captures.kineto.process_facts import read_facts
from warpwatch_daemon.captures.kineto.server import PAUSE_S, KinetoServer
from warpwatch_daemon.captures.policy import Policy
from warpwatch_daemon.captures.stacks import gil_stacks
from warpwatch_daemon.captures.store import Store
from warpwatch_daemon.captures.triggers.decisions import Triggers
from warpwatch_daemon.config.sections import Config
from warpwatch_daemon.ranks.folder import RendezvousFolder
from warpwatch_daemon.ranks.inboxes import Inboxes
from warpwatch_daemon.ranks.quotas import Quotas
from warpwatch_daemon.ranks.source import RanksSource
from warpwatch_daemon.state.hub import Hub
from warpwatch_telemetry.captures import COUNTER_KINDS

logger = logging.getLogger(__name__)

RETENTION_INTERVAL_S = 60.0
DISK_INTERVAL_S = 10.0
# A finisher that has something to do is woken.
FINISH_INTERVAL_S = 5.0
INBOXES_INTERVAL_S = 1.0
# Files that were never collected: of captures that this daemon no longer knows.
SWEEP_AFTER_S = 3600.0


class Capturing:
    """``node``: how alerts call this one. ``hurry`` gets whether a capture runs."""

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
        pollers = Pollers(lambda sender: read_facts(sender.pid, sender.uid))
        self._kineto = _kineto_server(folder, pollers, hub) if config.rendezvous.kineto else None
        self._inbox_disk = Disk(folder.inbox)
        self._backend = KinetoBackend(self.policy, self._inbox_disk, pollers, ranks.live)
        self.coordinator = Coordinator(
            self.policy, store, ranks, hub, hurry, self._wake, backends=(self._backend,)
        )
        self.triggers = Triggers(self.coordinator, ranks, hub)
        self.alerts = AlertRequests(
            lambda: hub.state() if hub.ranks_known() else None,
            self.coordinator.request,
            self.coordinator.register,
            config.triggers.recipes,
            ranks.targets,
            node,
        )
        self._inboxes = Inboxes(folder, ranks.served_pods, ranks.reject)
        self._finisher_loops: tuple[Loop, ...] = ()

    def counters_wanted(self) -> bool:
        """Whether a capture runs that needs the GPU's performance counters for itself."""
        return any(
            capture.request.kind in COUNTER_KINDS and capture.outcome is None
            for capture in self._hub.captures()
        )

    def publish_jobs(self) -> None:
        """Those that only Kineto sees."""
        self._hub.publish(kineto_jobs=self._backend.states())

    def start(self, supervisor: Supervisor) -> None:
        every, inboxes = supervisor.every, self._inboxes
        self._finisher_loops = (
            every("captures", FINISH_INTERVAL_S, self.coordinator.finish),
            every("stacks", FINISH_INTERVAL_S, self.coordinator.finish_urgent),
        )
        every("retention", RETENTION_INTERVAL_S, self.coordinator.retain)
        every("inboxes", INBOXES_INTERVAL_S, self._tend_inboxes)
        every("sweep", RETENTION_INTERVAL_S, lambda: inboxes.sweep(SWEEP_AFTER_S, time.time()))
        every("disk", DISK_INTERVAL_S, self.disk.measure)
        every("quotas", DISK_INTERVAL_S, self._quotas.measure)
        if self._kineto is not None:
            every("kineto", PAUSE_S, self._kineto.serve)
            every("inbox-disk", DISK_INTERVAL_S, self._inbox_disk.measure)
            every("kineto-traces", LOOK_INTERVAL_S, self._backend.look)

    def _tend_inboxes(self) -> None:
        self._inboxes.tend(time.monotonic())
        for ring, folder in self._ranks.take_ended():
            gil_stacks.remove(folder.inbox, gil_stacks.file_name(ring.name), ring.owner_uid)

    def stop(self) -> None:
        """Before the loops are."""
        if self._kineto is not None:
            self._kineto.stop()

    def close(self) -> None:
        """When the loops have ended."""
        self.coordinator.close()
        if self._kineto is not None:
            self._kineto.close()

    def _wake(self) -> None:
        for loop in self._finisher_loops:
            loop.wake()


def _kineto_server(folder: RendezvousFolder, pollers: Pollers, hub: Hub) -> KinetoServer | None:
    """None where there can be no socket."""
    rejected = hub.metrics.counter("rendezvous_rejected_total")
    try:
        return KinetoServer(
            folder.path / rendezvous.KINETO,
            pollers,
            lambda reason: rejected.labels(f"kineto_{reason}").inc(),
        )
    except OSError as error:
        logger.warning("no socket for Kineto in %s: %s", folder.path, error.strerror)
        return None
