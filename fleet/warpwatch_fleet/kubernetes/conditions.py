"""The condition `GpuHealthy` of nodes: False while hardware must leave service."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime

import msgspec

from warpwatch_fleet.cluster import Cluster
from warpwatch_fleet.kubernetes.api import (
    STRATEGIC,
    Api,
    ApiError,
    Object,
    node_path,
    timestamp,
)
from warpwatch_fleet.node import Node
from warpwatch_telemetry.anomalies import DEVICE_KINDS, sentence

logger = logging.getLogger(__name__)

TYPE = "GpuHealthy"
# An agent that restarts is back sooner.
AWAY_S = 60.0
# With a round each 5 s: two nodes a second.
MAX_PER_ROUND = 10
# What a node has is read again after so long, as others may have written it.
KNOWN_S = 600.0


@dataclass(frozen=True, slots=True)
class Condition:
    """status: True, False or Unknown. reason: one word; of False the kind of the first fault."""

    status: str
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class KnownNode:
    """What the cluster has. since: when its status became that; read_at: wall clock."""

    condition: Condition | None
    since: float
    read_at: float


class _OneCondition(msgspec.Struct):
    type: str = ""
    status: str = ""
    reason: str = ""
    message: str = ""
    lastTransitionTime: datetime | None = None


class _NodeStatus(msgspec.Struct):
    conditions: list[_OneCondition] | None = None


class _ClusterNode(msgspec.Struct):
    status: _NodeStatus = msgspec.field(default_factory=_NodeStatus)


class Conditions:
    """``advance`` in a loop of its own.

    ``known``: by name, the nodes whose condition the cluster has as it should be.
    """

    def __init__(self, api: Api, cluster: Cluster, wall: Callable[[], float] = time.time) -> None:
        self._api = api
        self._cluster = cluster
        self._wall = wall
        self.known: dict[str, KnownNode] = {}

    def wanted(self) -> dict[str, Condition]:
        """By node, of those whose agents have been heard."""
        now = self._wall()
        with self._cluster.lock:
            nodes = [
                node
                for node in self._cluster.nodes.values()
                if node.target.owner is None and node.name != node.target.address
            ]
            # Of two agents that say the same name, the one that can be followed.
            nodes.sort(key=lambda node: node.clock)
            return {node.name: _condition(node, now) for node in nodes}

    async def advance(self) -> None:
        """Raises ApiError; at the end, of a node whose condition was refused."""
        now, left, refused = self._wall(), MAX_PER_ROUND, None
        wanted = self.wanted()
        self.known = {name: one for name, one in self.known.items() if name in wanted}
        for name, condition in wanted.items():
            known = self.known.get(name)
            is_old = known is None or now - known.read_at > KNOWN_S
            if left > 0 and is_old:
                known, left = await self._read(name, now), left - 1
            if known and left > 0 and known.condition not in (condition, None):
                left -= 1
                try:
                    await self._write(name, condition, known, now)
                except ApiError as error:
                    if not error.is_of_one_object:
                        raise
                    refused = error
        if refused is not None:
            raise refused

    async def _read(self, name: str, now: float) -> KnownNode:
        """A node that the cluster does not have is left alone until it is read again."""
        try:
            node = await self._api.ask("GET", node_path(name), shape=_ClusterNode)
            known = _known(node, now)
        except ApiError as error:
            if not error.is_of_one_object:
                raise
            logger.warning("no condition of node %s: %s", name, error)
            known = KnownNode(None, now, now)
        self.known[name] = known
        return known

    async def _write(self, name: str, wanted: Condition, known: KnownNode, now: float) -> None:
        same = known.condition is not None and known.condition.status == wanted.status
        condition = {
            "type": TYPE,
            "status": wanted.status,
            "reason": wanted.reason,
            "message": wanted.message,
            "lastHeartbeatTime": timestamp(now),
            "lastTransitionTime": timestamp(known.since if same else now),
        }
        body = {"status": {"conditions": [condition]}}
        path = node_path(name, "status")
        node = await self._api.ask("PATCH", path, body, form=STRATEGIC, shape=_ClusterNode)
        self.known[name] = _known(node, now)
        logger.info("node %s: %s is %s: %s", name, TYPE, wanted.status, wanted.message)


def _known(node: Object, now: float) -> KnownNode:
    """``Condition`` of empty words where it has none."""
    for one in msgspec.convert(node, _ClusterNode).status.conditions or ():
        if one.type == TYPE:
            since = one.lastTransitionTime.timestamp() if one.lastTransitionTime else now
            return KnownNode(Condition(one.status, one.reason, one.message), since, now)
    return KnownNode(Condition("", "", ""), now, now)


def _condition(node: Node, now: float) -> Condition:
    if now - node.clock > AWAY_S:
        return Condition("Unknown", "AgentAway", "the agent of this node cannot be followed")
    # Hardware must leave service for what is critical, and for nothing else.
    critical = [one for one in node.anomalies() if one.severity == "critical"]
    active = [one for one in critical if one.kind in DEVICE_KINDS and one.end_time is None]
    # What lasts until it is served comes before what shows that it must be.
    found = sorted(active, key=lambda one: (one.kind != "device_needs_service", one.time))
    if not found:
        return Condition("True", "NoFault", "no fault of a GPU that needs service")
    reason = "".join(part.title() for part in found[0].kind.split("_"))
    return Condition("False", reason, "; ".join(map(sentence, found))[:1024])
