"""Leases of jobs to a fleet: what this node finds of them is kept back.

The detectors run on, so that the node can continue at once if the fleet stops.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from warpwatch_detection.anomalies.register import Change
from warpwatch_telemetry.anomalies import FLEET_KINDS, Anomaly
from warpwatch_telemetry.errors import Refused
from warpwatch_telemetry.jobs import JobId
from warpwatch_telemetry.newest import put_newest

MAX_LEASES = 1024
# The longest lease.
MAX_S = 60.0
# If a fleet stopped, its anomalies keep their ids for this time.
REMEMBERED_S = 600.0
# Twice the number of anomalies that may be active: closed ones are remembered as well.
MAX_KEPT_BACK = 2000


class Lease(NamedTuple):
    """A lease until a time of the monotonic clock.

    holder: the name of the fleet. raised: the ids of its anomalies of the job, by kind, which this
    node continues if the fleet stops.
    """

    holder: str
    until: float
    raised: Mapping[str, str] = {}


@dataclass(slots=True)
class LeasesState:
    """The leases as the next daemon loads them, until times of the wall clock."""

    leases: dict[JobId, Lease] = field(default_factory=dict)
    kept_back: dict[str, None] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)


class JobLeases:
    """The leases of this node. Only ``acquire`` may be called from any thread."""

    state_version, state_form = 1, LeasesState

    def __init__(
        self, monotonic: Callable[[], float] = time.monotonic, wall: Callable[[], float] = time.time
    ) -> None:
        self._monotonic = monotonic
        self._wall = wall
        self._lock = threading.Lock()
        self._leases: dict[JobId, Lease] = {}
        # Ids of anomalies that are not reported, in the order in which they were found.
        self._kept_back: dict[str, None] = {}
        # The ids that the fleet gave to anomalies before it stopped, by our own ids.
        self._names: dict[str, str] = {}

    @property
    def state(self) -> LeasesState:
        ahead_s = self._wall() - self._monotonic()
        with self._lock:
            leases = {
                job: lease._replace(until=lease.until + ahead_s)
                for job, lease in self._leases.items()
            }
        return LeasesState(leases, self._kept_back, self._names)

    @state.setter
    def state(self, state: LeasesState) -> None:
        now = self._monotonic()
        ahead_s = self._wall() - now
        self._kept_back, self._names = state.kept_back, state.names
        self._leases = {
            job: lease._replace(until=min(lease.until - ahead_s, now + MAX_S))
            for job, lease in state.leases.items()
        }

    def acquire(
        self, job: JobId, holder: str, seconds: float, raised: Mapping[str, str] | None = None
    ) -> None:
        """Acquire or renew a lease. Raises Refused while another fleet has it."""
        now = self._monotonic()
        with self._lock:
            held = self._leases.get(job)
            if held is not None and held.holder != holder and held.until > now:
                raise Refused("refused_busy", f"the fleet {held.holder} evaluates this job")
            if held is None and len(self._leases) >= MAX_LEASES:
                raise Refused("refused_busy", f"{MAX_LEASES} jobs are evaluated by fleets already")
            self._leases[job] = Lease(holder, now + seconds, raised or {})

    def raised(self, changes: Iterable[Change]) -> list[Change]:
        found = [self._raised(change) for change in changes]
        return [change for change in found if change is not None]

    def _raised(self, change: Change) -> Change | None:
        anomaly = change.anomaly
        if change.what == "opened" and self._is_judged(anomaly):
            put_newest(self._kept_back, anomaly.id, None, MAX_KEPT_BACK)
        if anomaly.id in self._kept_back:
            return None
        if change.what == "opened":
            return self._goes_on(anomaly)
        return Change(change.what, self._named(anomaly))

    def _lease(self, anomaly: Anomaly) -> Lease | None:
        """Return the lease of the anomaly's job, current or just expired."""
        if anomaly.kind not in FLEET_KINDS or anomaly.job_id is None:
            return None
        return self._leases.get(anomaly.job_id)

    def _is_judged(self, anomaly: Anomaly) -> bool:
        lease = self._lease(anomaly)
        return lease is not None and lease.until > self._monotonic()

    def _named(self, anomaly: Anomaly) -> Anomaly:
        name = self._names.get(anomaly.id)
        return anomaly if name is None else replace(anomaly, id=name)

    def expire(self, active: Iterable[Anomaly]) -> list[Change]:
        """Return the anomalies that expired leases make this node's, and forget such leases.

        An anomaly of the fleet continues under the fleet's id until a fleet has the job again.
        """
        changes = []
        for one in active:
            if one.id in self._kept_back and not self._is_judged(one):
                del self._kept_back[one.id]
                changes.append(self._goes_on(one))
            elif one.id in self._names and self._is_judged(one):
                changes.append(self._handed_back(one))
        with self._lock:
            past = self._monotonic() - REMEMBERED_S
            for job in [job for job, lease in self._leases.items() if lease.until <= past]:
                del self._leases[job]
        return changes

    def _goes_on(self, anomaly: Anomaly) -> Change:
        lease = self._lease(anomaly)
        name = None if lease is None else lease.raised.get(anomaly.kind)
        if name is None:
            return Change("opened", anomaly)
        put_newest(self._names, anomaly.id, name, MAX_KEPT_BACK)
        return Change("reopened", self._named(anomaly))

    def _handed_back(self, anomaly: Anomaly) -> Change:
        said = f"{anomaly.summary}; a fleet judges the job again"
        ended = replace(self._named(anomaly), summary=said, end_time=self._wall())
        del self._names[anomaly.id]
        put_newest(self._kept_back, anomaly.id, None, MAX_KEPT_BACK)
        return Change("closed", ended)

    def is_of_fleet(self, anomaly: Anomaly) -> bool:
        """Return whether it continues an anomaly of the fleet."""
        return anomaly.id in self._names.copy().values()

    def shown(self, anomalies: Iterable[Anomaly]) -> tuple[Anomaly, ...]:
        """Return the anomalies that are not kept back, under the fleet's ids."""
        return tuple(self._named(one) for one in anomalies if one.id not in self._kept_back)
