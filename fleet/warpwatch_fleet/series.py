"""The metrics of a fleet's agents and jobs; ranks are on the ``/metrics`` of their agents."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import psutil

from warpwatch_fleet.cluster import Cluster
from warpwatch_fleet.jobs import FleetJob
from warpwatch_fleet.node import Node
from warpwatch_runtime.agent_metrics import AgentMetrics


def measure_process(metrics: AgentMetrics) -> None:
    """Export what the fleet's own process uses."""
    own = psutil.Process()
    metrics.read("agent_resident_memory_bytes", lambda: {(): own.memory_info().rss})
    metrics.read("agent_cpu_seconds_total", lambda: {(): sum(own.cpu_times()[:2])})
    metrics.read("agent_open_files", lambda: {(): own.num_fds()})
    metrics.read("agent_threads", lambda: {(): own.num_threads()})
    metrics.read("agent_start_timestamp_seconds", lambda: {(): own.create_time()})


class Series:
    """Read with each scrape."""

    def __init__(
        self,
        metrics: AgentMetrics,
        cluster: Cluster,
        wall: Callable[[], float] = time.time,
        partitions: int = 1,
        evaluated: Callable[[], Mapping[str, float]] = dict,
    ) -> None:
        def lag_s(node: Node) -> float | None:
            return node.health(wall()).lag_s or 0.0 if node.up else None

        def step_s(job: FleetJob) -> float | None:
            return job.step_s(wall())

        self._cluster = cluster
        metrics.read("fleet_agents", self._agents)
        metrics.read("fleet_agent_up", self._ups)
        metrics.read("fleet_agent_lag_seconds", lambda: self._of_agents(lag_s))
        metrics.read("fleet_partitions", lambda: {(): partitions})
        metrics.read("fleet_partition_judged", evaluated)
        metrics.read("fleet_refused_total", self._refused)
        metrics.read("fleet_newer_total", lambda: self._of_agents(lambda node: node.newer or None))
        metrics.read("fleet_agent_info", self._versions)
        metrics.read("fleet_job_ranks", lambda: self._of_jobs(lambda job: len(job.members)))
        metrics.read("fleet_job_nodes", lambda: self._of_jobs(lambda job: len(job.live_nodes())))
        metrics.read("fleet_job_step_seconds", lambda: self._of_jobs(step_s))

    def _agents(self) -> Mapping[str, float]:
        with self._cluster.lock:
            agents = list(self._cluster.agents())
            up = sum(node.up for node in agents)
            return {"up": up, "down": len(agents) - up}

    def _ups(self) -> Mapping[str, float]:
        """Return 1 for nodes that are followed; a name that two agents claim is not up."""
        with self._cluster.lock:
            ups: dict[str, float] = {}
            for node in self._cluster.agents():
                ups[node.name] = min(node.up, ups.get(node.name, True))
            return ups

    def _of_agents(self, value: Callable[[Node], float | None]) -> Mapping[str, float]:
        with self._cluster.lock:
            found = [(node.name, value(node)) for node in self._cluster.agents()]
        return {name: number for name, number in found if number is not None}

    def _refused(self) -> Mapping[str, float]:
        with self._cluster.lock:
            return self._cluster.count_refused()

    def _versions(self) -> Mapping[tuple[str, str], float]:
        with self._cluster.lock:
            return {(n.name, n.version): 1 for n in self._cluster.agents() if n.version}

    def _of_jobs(
        self, value: Callable[[FleetJob], float | None]
    ) -> Mapping[tuple[str, str, str], float]:
        with self._cluster.lock:
            known = {job.id: value(job) for job in self._cluster.jobs.values()}
        return {
            (job.name, job.owner, job.run): number
            for job, number in known.items()
            if number is not None
        }
