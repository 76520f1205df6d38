"""Anomalies as Events, which `kubectl describe` shows with the pod or the node that they are on."""

from __future__ import annotations

import math
import re
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

from warpwatch_exporters.events import anomaly_link
from warpwatch_fleet.cluster import Cluster
from warpwatch_fleet.jobs import FleetJob
from warpwatch_fleet.kubernetes.api import (
    MERGE,
    KubernetesClient,
    KubernetesError,
    Object,
    timestamp,
)
from warpwatch_telemetry.anomalies import DEVICE_KINDS, Anomaly, sentence
from warpwatch_telemetry.jobs import JobId
from warpwatch_telemetry.newest import put_newest

# With a round each 5 s: two writes a second.
MAX_PER_ROUND = 10
# An API server forgets an Event after an hour, so a lasting anomaly is repeated.
AGAIN_S = 1800.0
# The API's own limit.
MAX_NOTE = 1024
# An anomaly that closed this time before the fleet started is not reported.
OLD_S = 600.0
# The longest queue of Events that are about no anomaly.
MAX_MORE = 1000
_NAMESPACE = re.compile(r"ns/([a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?)")
# The fields of the API's object that may change.
_CHANGING = ("message", "lastTimestamp", "count", "type")


class EventPublisher:
    """``advance`` runs in a loop of its own. public_url: the address of the fleet's page.

    Reported Events are read back from the API server: the name of an Event follows from its
    anomaly, so that another fleet goes on with it.
    """

    def __init__(
        self,
        api: KubernetesClient,
        cluster: Cluster,
        public_url: str,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._api = api
        self._cluster = cluster
        self._url = public_url
        self._wall = wall
        self._since = wall() - OLD_S
        # By path: further Events of nodes, and all Events as they were last sent.
        self._more: dict[str, Object] = {}
        self._sent: dict[str, Object] = {}
        # When an Event of each source was last written.
        self._served: dict[str, float] = {}

    def put(self, node: str, reason: str, note: str, *, warns: bool) -> None:
        """Report an action on a node."""
        now = self._wall()
        event = _event(f"{reason}/{node}/{note}", about_node(node), reason, note, warns, now, now)
        put_newest(self._more, _path(event), event, MAX_MORE)

    async def advance(self) -> None:
        """Publish new Events.

        Raises KubernetesError if the server is overloaded or not reached, and at the end for an
        Event that it has refused.
        """
        now, refused = self._wall(), None
        with self._cluster.lock:
            found = list(self._of_anomalies(now))
        wanted = {_path(event): event for _, event in found} | self._more
        sources = {_path(event): source for source, event in found}
        self._sent = {path: event for path, event in self._sent.items() if path in wanted}
        waiting = [path for path, event in wanted.items() if self._sent.get(path) != event]
        for path in self._in_turn(waiting, sources)[:MAX_PER_ROUND]:
            self._served[sources.get(path, "")] = now
            try:
                await self._write(path, wanted[path])
            except KubernetesError as error:
                if not error.is_of_one_object:
                    raise
                # The namespace was removed, or the fleet has no rights in it: do not try again.
                refused = error
            self._sent[path] = wanted[path]
        if refused is not None:
            raise refused

    def _in_turn(self, waiting: Sequence[str], sources: Mapping[str, str]) -> list[str]:
        """Order by source in turn, so that one agent's flood delays no other agent.

        The source that was served longest ago comes first.
        """
        turns: Counter[str] = Counter()
        order = []
        for path in waiting:
            source = sources.get(path, "")
            turns[source] += 1
            order.append((turns[source], self._served.get(source, 0.0), path))
        self._served = {name: at for name, at in self._served.items() if name in turns}
        return [path for *_, path in sorted(order)]

    async def _write(self, path: str, event: Object) -> None:
        """Change the Event, or create it if it was removed."""
        changes = {name: event[name] for name in _CHANGING}
        try:
            if path in self._sent:
                await self._api.ask("PATCH", path, changes, form=MERGE)
                return
        except KubernetesError as error:
            if error.status != 404:
                raise
        try:
            await self._api.ask("POST", path.rpartition("/")[0], event)
        except KubernetesError as error:
            if error.status != 409:
                raise
            await self._api.ask("PATCH", path, changes, form=MERGE)

    def _of_anomalies(self, now: float) -> Iterator[tuple[str, Object]]:
        """Yield each with its source: the agent that found it, or the owner of the job."""
        jobs = {name: job for job in self._cluster.jobs.values() for name in job.names()}
        for anomaly in self._cluster.anomalies():
            about = self._about(anomaly, jobs)
            if about and not (anomaly.end_time and anomaly.end_time < self._since):
                source = anomaly.owner if anomaly.judged_by == "fleet" else anomaly.node
                yield source, _of(anomaly, about, now, anomaly_link(self._url, anomaly.id))

    def _about(self, anomaly: Anomaly, jobs: Mapping[JobId, FleetJob]) -> dict[str, str] | None:
        """Return the pod or node of an anomaly, or None if neither is known."""
        if anomaly.kind in DEVICE_KINDS:
            is_node = self._cluster.node_names.has(anomaly.node)
            return about_node(anomaly.node) if is_node else None
        job, owner = anomaly.job_id, _NAMESPACE.fullmatch(anomaly.owner)
        if job is None or owner is None:
            return None
        members = jobs[job].members if job in jobs else {}
        first = min(members, default=0) if anomaly.rank is None else anomaly.rank
        seen = members[first].seen if first in members else None
        if seen is None or not seen.pod:
            return None
        about = {"namespace": owner[1], "name": seen.pod, "uid": seen.pod_uid}
        return {"apiVersion": "v1", "kind": "Pod", **about}


def about_node(name: str) -> dict[str, str]:
    """Return a reference to the node; like a kubelet, with its name as UID."""
    return {"apiVersion": "v1", "kind": "Node", "name": name, "uid": name}


def _of(anomaly: Anomaly, about: Mapping[str, str], now: float, link: str) -> Object:
    end = anomaly.end_time
    lasted = max(0.0, (now if end is None else end) - anomaly.time)
    again = anomaly.time + (lasted if end else lasted // AGAIN_S * AGAIN_S)
    how = "explained: " if anomaly.explained_by else "over: " if end else ""
    text = how + sentence(anomaly)
    note = f"{text[: MAX_NOTE - len(link) - 1]} {link}".strip()
    reason = "".join(part.title() for part in anomaly.kind.split("_"))
    key = f"{anomaly.id}/{anomaly.node}/{anomaly.owner}"
    return _event(key, about, reason, note, anomaly.severity != "info", anomaly.time, again)


def _event(
    key: str,
    about: Mapping[str, str],
    reason: str,
    note: str,
    warns: bool,
    begin: float,
    again: float,
) -> Object:
    """Return an Event. key: identifies it. about: the involvedObject.

    begin, again: wall clock of the first and the last report. A node's Event is in ``default``,
    where kubectl looks for it.
    """
    plain = re.sub(r"[^a-z0-9]+", "-", key.lower()).strip("-")[:40]
    name = f"warpwatch-{plain}-{zlib.crc32(key.encode(errors='replace')):08x}"
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": name, "namespace": about.get("namespace", "default")},
        "involvedObject": dict(about),
        "reason": reason,
        "source": {"component": "warpwatch-fleet"},
        "message": note,
        "type": "Warning" if warns else "Normal",
        "count": 1 + math.ceil((again - begin) / AGAIN_S),
        "firstTimestamp": timestamp(begin),
        "lastTimestamp": timestamp(again),
    }


def _path(event: Object) -> str:
    about = event["metadata"]
    return f"/api/v1/namespaces/{about['namespace']}/events/{about['name']}"
