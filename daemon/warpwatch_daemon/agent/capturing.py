"""What captures are made of, put together: store, policy, back ends, who asks, and their loops."""

from __future__ import annotations

import time
from collections.abc import Callable

from warpwatch_capturing.alerts.alert_requests import AlertRequests
from warpwatch_capturing.disk import Disk
from warpwatch_capturing.policy import Policy
from warpwatch_capturing.register import CaptureRegister
from warpwatch_capturing.service import CaptureService
from warpwatch_capturing.store import Store
from warpwatch_capturing.triggers.decisions import Triggers
from warpwatch_daemon.config.sections import Config
from warpwatch_daemon.participants.local_ranks import LocalParticipants
from warpwatch_daemon.participants.stacks import gil_stacks
from warpwatch_daemon.ranks.folder import RendezvousFolder
from warpwatch_daemon.ranks.inboxes import Inboxes
from warpwatch_daemon.ranks.quotas import Quotas
from warpwatch_daemon.ranks.source import RanksSource
from warpwatch_daemon.state.hub import Hub
from warpwatch_runtime.supervisor import Loop, Supervisor
from warpwatch_telemetry.captures import COUNTER_KINDS

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
        self.service = CaptureService(
            self.policy, CaptureRegister(store, hub), LocalParticipants(self.policy, ranks), hub,
            hurry, self._wake,
        )  # fmt: skip
        self.triggers = Triggers(self.service, ranks, hub)
        self.alerts = AlertRequests(
            lambda: hub.state() if hub.ranks_known() else None,
            self.service.request,
            self.service.register,
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
            gil_stacks.remove(folder.inbox, gil_stacks.file_name(ring.name), ring.owner_uid)

    def close(self) -> None:
        """When the loops have ended."""
        self.service.close()

    def _wake(self) -> None:
        for loop in self._finisher_loops:
            loop.wake()
