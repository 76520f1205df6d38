"""The partitions of this worker, seen as one cluster by everything that is not about partitions."""

from __future__ import annotations

import threading
from collections import ChainMap, Counter
from collections.abc import Collection, Iterator, Mapping

from warpwatch_detection.anomalies.tracked import Suppressed
from warpwatch_detection.detector import DetectorStatus
from warpwatch_fleet.cluster import Cluster, drop_waiting
from warpwatch_fleet.jobs import FleetJob
from warpwatch_fleet.node import Node, NodeNames
from warpwatch_fleet.targets import Target
from warpwatch_telemetry.anomalies import Anomaly
from warpwatch_telemetry.jobs import JobId


class Partitions:
    """Implements ``cluster.View``. Callers hold ``lock``."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.node_names = NodeNames()
        self._clusters: dict[int, Cluster] = {}
        # The refusals of partitions that another worker has now.
        self._refused: Counter[str] = Counter()
        self.nodes: Mapping[str, Node] = {}
        self.jobs: Mapping[JobId, FleetJob] = {}

    def put(self, partition: int, cluster: Cluster) -> None:
        self._clusters[partition] = cluster
        self._join()

    def remove(self, partition: int) -> None:
        cluster = self._clusters.pop(partition, None)
        if cluster is not None:
            self._refused += cluster.count_refused()
            for node in cluster.nodes.values():
                self.node_names.release(node)
            self._join()

    def _join(self) -> None:
        self.nodes = ChainMap(*(one.nodes for one in self._clusters.values()))
        self.jobs = ChainMap(*(one.jobs for one in self._clusters.values()))

    @property
    def raised(self) -> Mapping[JobId, Counter[str]]:
        return ChainMap(*(one.raised for one in self._clusters.values()))

    def names(self) -> dict[str, str]:
        return {address: node.name for address, node in self.nodes.items()}

    def is_heard(self) -> bool:
        return bool(self._clusters)

    def forget_newest(self, owner: str) -> None:
        """Forget a job of the owner, in the partition where it has most."""
        most = max(
            self._clusters.values(), key=lambda one: sum(job.owner == owner for job in one.jobs)
        )
        most.forget_newest(owner)

    def drop_waiting(self) -> None:
        drop_waiting(job for one in self._clusters.values() for job in one.jobs.values())

    def anomalies(self) -> Iterator[Anomaly]:
        for cluster in self._clusters.values():
            yield from cluster.anomalies()

    def leases_due(
        self, now: float, changed: Collection[JobId | None]
    ) -> list[tuple[Target, JobId, dict[str, str]]]:
        return [one for each in self._clusters.values() for one in each.leases_due(now, changed)]

    def detector_statuses(self) -> tuple[dict[str, list[DetectorStatus]], list[Suppressed]]:
        statuses: dict[str, list[DetectorStatus]] = {}
        suppressed: list[Suppressed] = []
        for cluster in self._clusters.values():
            found, more = cluster.detector_statuses()
            for kind, readings in found.items():
                statuses.setdefault(kind, []).extend(readings)
            suppressed += more
        return statuses, suppressed

    def count_refused(self) -> Counter[str]:
        return sum((one.count_refused() for one in self._clusters.values()), self._refused)
