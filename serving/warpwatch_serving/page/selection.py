"""The part of a state that the page's filters select: jobs, nodes, and what concerns them."""

from __future__ import annotations

from dataclasses import replace

from warpwatch_serving.bodies import PageFilters
from warpwatch_telemetry.anomalies import Anomaly
from warpwatch_telemetry.jobs import JobId
from warpwatch_telemetry.state import State

# A page with fewer jobs and nodes is searched faster by eye.
MIN_OFFERED = 4
MAX_OWNERS = 100


class Selection:
    """Filters applied to a state.

    A job is selected by its name and owner, or by the name of a node that it runs on. A node is
    selected by its name, or by the name or owner of a job on it.
    """

    def __init__(self, state: State, wanted: PageFilters) -> None:
        self._before, self._wanted = state, wanted
        # Sources of an agent are not nodes.
        self._known_nodes = {one.name for one in state.sources if one.lag_s is not None}
        self._text = (wanted.q or "").casefold()
        self._hosts: dict[JobId, set[str]] = {job.job_id: set() for job in state.jobs}
        for rank in state.ranks:
            self._hosts.setdefault(rank.job_id, set()).add(rank.host)
        named = {job for job in self._hosts if self.names(job.owner, job.name)}
        self._jobs = named | {job for job in self._hosts if self._runs_on_named(job)}
        hosts = {host for job in self._jobs for host in self._hosts[job]}
        hosts_of_named = {host for job in named for host in self._hosts[job]}
        has_job = hosts if wanted.job or wanted.owner else self._known_nodes
        by_name = {name for name in has_job if self._names_node(name)}
        self._nodes = self._known_nodes & (by_name | hosts_of_named)
        self.state = self._selected() if self.narrows else state

    @property
    def narrows(self) -> bool:
        wanted = self._wanted
        return any((wanted.job, wanted.owner, wanted.node, wanted.q))

    @property
    def is_empty(self) -> bool:
        found = self.state
        return self.narrows and not (found.jobs or found.anomalies or self._nodes)

    @property
    def is_offered(self) -> bool:
        """Whether there is so much that a search helps."""
        size = max(len(self._before.jobs), len(self._known_nodes))
        return self.narrows or size >= MIN_OFFERED

    def owners(self) -> list[str]:
        return sorted({job.owner for job in self._before.jobs if job.owner})[:MAX_OWNERS]

    def counts(self) -> list[str]:
        """Return how many jobs, ranks and nodes are selected, and of how many."""
        now, before = self.state, self._before
        found = [
            ("jobs", len(now.jobs), len(before.jobs)),
            ("ranks", len(now.ranks), len(before.ranks)),
            ("nodes", len(self._nodes), len(self._known_nodes)),
        ]
        return [
            f"{count:,} of {whole:,} {what}" if count != whole else f"{count:,} {what}"
            for what, count, whole in found
            if whole
        ]

    def names(self, owner: str, job: str) -> bool:
        """Return whether a job is selected by its own name and owner."""
        if self._wanted.node is not None or not self._wanted.admits(owner=owner, job=job):
            return False
        return self._text in owner.casefold() or self._text in job.casefold()

    def _runs_on_named(self, job: JobId) -> bool:
        is_admitted = self._wanted.admits(owner=job.owner, job=job.name)
        return is_admitted and any(map(self._names_node, self._hosts[job]))

    def _names_node(self, name: str) -> bool:
        return self._wanted.admits(node=name) and self._text in name.casefold()

    def has_job(self, job: JobId) -> bool:
        # Anomalies, captures and runs stay after their job is forgotten.
        return job in self._jobs or (job not in self._hosts and self.names(job.owner, job.name))

    def _has_anomaly(self, anomaly: Anomaly) -> bool:
        if anomaly.job_id is None:
            return anomaly.node in self._nodes or not anomaly.node
        return self.has_job(anomaly.job_id)

    def _has_source(self, name: str) -> bool:
        return name in self._nodes or name not in self._known_nodes

    def _selected(self) -> State:
        before, names = self._before, {(job.owner, job.name) for job in self._jobs}
        return replace(
            before,
            jobs=tuple(one for one in before.jobs if one.job_id in self._jobs),
            ranks=tuple(one for one in before.ranks if one.job_id in self._jobs),
            anomalies=tuple(filter(self._has_anomaly, before.anomalies)),
            captures=tuple(one for one in before.captures if self.has_job(one.request.job_id)),
            sensitivities=tuple(
                one for one in before.sensitivities if (one.owner, one.job) in names
            ),
            sources=tuple(one for one in before.sources if self._has_source(one.name)),
            devices=tuple(one for one in before.devices if self._has_source(one.source)),
        )
