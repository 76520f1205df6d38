"""Which jobs a fleet judges for this node: what is found of them here is kept back.

The detectors run on as ever, so when a fleet is gone the node goes on at once with what it knows.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

from warpwatch_detection.anomalies.changes import Change
from warpwatch_telemetry.anomalies import FLEET_KINDS, Anomaly
from warpwatch_telemetry.errors import Refused
from warpwatch_telemetry.jobs import JobId

MAX_LEASES = 1024
# As many as may be active, and as many again that have ended and are remembered.
MAX_KEPT_BACK = 2000


class Lease(NamedTuple):
    """Until a time of the monotonic clock. holder: what the fleet calls itself."""

    holder: str
    until: float


class Leases:
    """``take`` may be called from any thread, the rest is the pipeline's."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._leases: dict[JobId, Lease] = {}
        # Ids of anomalies that are not raised, in the order in which they were found.
        self._kept_back: dict[str, None] = {}

    def take(self, job: JobId, holder: str, seconds: float) -> None:
        """Take or renew it. Raises Refused while another fleet has it."""
        now = self._clock()
        with self._lock:
            held = self._leases.get(job)
            if held is not None and held.holder != holder and held.until > now:
                raise Refused("refused_busy", f"{held.holder} judges this job")
            if held is None and len(self._leases) >= MAX_LEASES:
                raise Refused("refused_busy", f"{MAX_LEASES} jobs are judged by fleets already")
            self._leases[job] = Lease(holder, now + seconds)

    def raised(self, changes: Iterable[Change]) -> list[Change]:
        """Those that are this node's to raise."""
        return [change for change in changes if not self._keeps_back(change)]

    def _keeps_back(self, change: Change) -> bool:
        anomaly = change.anomaly
        if change.what == "opened" and self._is_judged(anomaly):
            self._kept_back[anomaly.id] = None
            if len(self._kept_back) > MAX_KEPT_BACK:
                del self._kept_back[next(iter(self._kept_back))]
        return anomaly.id in self._kept_back

    def _is_judged(self, anomaly: Anomaly) -> bool:
        return anomaly.kind in FLEET_KINDS and anomaly.job_id in self._leases

    def expire(self, active: Iterable[Anomaly]) -> list[Change]:
        """Of jobs whose lease has ended: what is still so is raised now."""
        now = self._clock()
        with self._lock:
            ended = [job for job, lease in self._leases.items() if lease.until <= now]
            for job in ended:
                del self._leases[job]
        if not ended:
            return []
        raised = [one for one in active if one.id in self._kept_back and one.job_id in ended]
        for one in raised:
            del self._kept_back[one.id]
        return [Change("opened", one) for one in raised]

    def shown(self, anomalies: Iterable[Anomaly]) -> tuple[Anomaly, ...]:
        """Without those that are kept back."""
        return tuple(one for one in anomalies if one.id not in self._kept_back)
