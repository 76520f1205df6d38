"""Anomalies as Events, which `kubectl describe` shows with the pod or the node that they are on."""

from __future__ import annotations

import logging
import math
import re
import threading
import time
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from warpwatch_fleet.cluster import Cluster
from warpwatch_fleet.kubernetes.api import MERGE, Api, ApiError, Object, timestamp
from warpwatch_telemetry.anomalies import DEVICE_KINDS, Anomaly
from warpwatch_telemetry.jobs import shard_key

logger = logging.getLogger(__name__)

# With a round each 5 s: two writes a second.
MAX_PER_ROUND = 10
# An API server forgets an Event after an hour; what lasts longer is told again.
AGAIN_S = 1800.0
# The API's own limit.
MAX_NOTE = 1024
# What was over before the fleet began is not news after so long.
OLD_S = 600.0
_NAMESPACE = re.compile(r"ns/([a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?)")


@dataclass(frozen=True, slots=True)
class Event:
    """key: what makes it one Event, whatever is told of it later. about: the involvedObject.

    begin, end, again: wall clock; ``again`` is when it was last told.
    """

    key: str
    about: Mapping[str, str]
    reason: str
    note: str
    warns: bool
    begin: float
    again: float

    @property
    def name(self) -> str:
        plain = re.sub(r"[^a-z0-9]+", "-", self.key.lower()).strip("-")[:40]
        return f"warpwatch-{plain}-{zlib.crc32(self.key.encode(errors='replace')):08x}"

    @property
    def namespace(self) -> str:
        """Of what is about a node: where kubectl looks for it."""
        return self.about.get("namespace", "default")

    def changing(self) -> Object:
        """Of the API's object, what may change."""
        return {
            "message": self.note[:MAX_NOTE],
            "lastTimestamp": timestamp(self.again),
            "count": 1 + math.ceil((self.again - self.begin) / AGAIN_S),
            "type": "Warning" if self.warns else "Normal",
        }

    def whole(self) -> Object:
        return {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": self.name, "namespace": self.namespace},
            "involvedObject": dict(self.about),
            "reason": self.reason,
            "source": {"component": "warpwatch-fleet"},
            "firstTimestamp": timestamp(self.begin),
            **self.changing(),
        }


def about_node(name: str) -> dict[str, str]:
    """A kubelet, too, takes a node's name for its UID."""
    return {"apiVersion": "v1", "kind": "Node", "name": name, "uid": name}


class Events:
    """``advance`` in a loop of its own. ``lock`` guards the cluster; link: of the fleet's page.

    What has been told is read back from the API server: an Event has a name that follows from its
    anomaly, so another fleet goes on with it.
    """

    def __init__(
        self, api: Api, cluster: Cluster, lock: threading.Lock, shard: tuple[int, int], link: str
    ) -> None:
        self._api = api
        self._cluster = cluster
        self._lock = lock
        self._shard = shard
        self._link = link
        self._since = time.time() - OLD_S
        # What is to be told besides, by key.
        self._more: dict[str, Event] = {}
        self._told: dict[str, Event] = {}

    def put(self, event: Event) -> None:
        """Tell it once more, or anew."""
        self._more[event.key] = event
        if len(self._more) > 1000:
            del self._more[next(iter(self._more))]

    async def advance(self) -> None:
        """Raises ApiError where the server has had enough, or is not reached."""
        now = time.time()
        with self._lock:
            wanted = {event.key: event for event in self._of_anomalies(now)} | self._more
        self._told = {key: event for key, event in self._told.items() if key in wanted}
        waiting = [event for event in wanted.values() if self._told.get(event.key) != event]
        for event in waiting[:MAX_PER_ROUND]:
            try:
                await self._write(event)
            except ApiError as error:
                if error.status not in (403, 404, 422):
                    raise
                # Of a namespace that is gone, or where the fleet has no right: not again and again.
                logger.warning("no Event on %s: %s", event.about["name"], error)
            self._told[event.key] = event

    async def _write(self, event: Event) -> None:
        path = f"/api/v1/namespaces/{event.namespace}/events"
        try:
            if event.key in self._told:
                await self._change(path, event)
            else:
                await self._api.ask("POST", path, event.whole())
        except ApiError as error:
            if error.status == 409:
                await self._change(path, event)
            elif error.status == 404 and event.key in self._told:
                await self._api.ask("POST", path, event.whole())
            else:
                raise

    async def _change(self, path: str, event: Event) -> None:
        await self._api.ask("PATCH", f"{path}/{event.name}", event.changing(), form=MERGE)

    def _of_anomalies(self, now: float) -> Iterator[Event]:
        for anomaly in self._cluster.anomalies():
            about = self._about(anomaly)
            if about and not (anomaly.end_time and anomaly.end_time < self._since):
                yield _event(anomaly, about, now, self._link)

    def _about(self, anomaly: Anomaly) -> dict[str, str] | None:
        """None: neither a pod nor a node of the cluster is known for it, or another fleet tells."""
        index, of = self._shard
        if anomaly.kind in DEVICE_KINDS:
            return about_node(anomaly.node) if anomaly.node and index == 0 else None
        job, owner = anomaly.job_id, _NAMESPACE.fullmatch(anomaly.owner)
        if job is None or owner is None or shard_key(job) % of != index:
            return None
        known = next((one for one in self._cluster.jobs.values() if job in one.names()), None)
        members = known.members if known else {}
        first = min(members, default=0) if anomaly.rank is None else anomaly.rank
        seen = members[first].seen if first in members else None
        if seen is None or not seen.pod:
            return None
        about = {"namespace": owner[1], "name": seen.pod, "uid": seen.pod_uid}
        return {"apiVersion": "v1", "kind": "Pod", **about}


def _event(anomaly: Anomaly, about: Mapping[str, str], now: float, link: str) -> Event:
    end = anomaly.end_time
    lasted = max(0.0, (now if end is None else end) - anomaly.time)
    again = anomaly.time + (lasted if end else lasted // AGAIN_S * AGAIN_S)
    over = f"over after {lasted:.0f} s: " if end else ""
    room = MAX_NOTE - len(over) - len(link) - 1
    return Event(
        f"{anomaly.id}/{anomaly.node}/{anomaly.owner}",
        about,
        "".join(part.title() for part in anomaly.kind.split("_")),
        f"{over}{anomaly.summary[:room]} {link}".strip(),
        anomaly.severity != "info",
        anomaly.time,
        again,
    )
