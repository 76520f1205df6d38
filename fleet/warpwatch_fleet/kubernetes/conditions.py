"""The condition `GpuHealthy` of nodes: False while hardware must leave service."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime

import msgspec

from warpwatch_fleet.cluster import Cluster
from warpwatch_fleet.config import KubernetesConfig
from warpwatch_fleet.kubernetes.api import (
    MERGE,
    STRATEGIC,
    KubernetesClient,
    KubernetesError,
    Metadata,
    Object,
    node_path,
    timestamp,
)
from warpwatch_fleet.kubernetes.events import EventPublisher
from warpwatch_fleet.node import Node
from warpwatch_telemetry.anomalies import DEVICE_KINDS, sentence

logger = logging.getLogger(__name__)

TYPE = "GpuHealthy"
# An agent that restarts is back sooner.
AWAY_S = 60.0
# Within this time a removed target's node is `Unknown`; it may have left the cluster.
REMOVED_S = 3600.0
# With a round each 5 s: two nodes a second.
MAX_PER_ROUND = 10
# Nodes are read again after this time, as other programs may have written to them.
KNOWN_S = 600.0


@dataclass(frozen=True, slots=True)
class Condition:
    """status: True, False or Unknown. reason: one word; of False the kind of the first fault."""

    status: str
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class KnownNode:
    """The condition in the cluster. since: when its status changed last; read_at: wall clock."""

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
    """The conditions of nodes. ``advance`` needs a loop of its own.

    ``known``: by name, the nodes whose condition the cluster has as it should be.
    """

    def __init__(
        self, api: KubernetesClient, cluster: Cluster, wall: Callable[[], float] = time.time
    ) -> None:
        self._api = api
        self._cluster = cluster
        self._wall = wall
        self.known: dict[str, KnownNode] = {}
        # By name, also those whose targets were removed.
        self._nodes: dict[str, Node] = {}

    def wanted(self) -> dict[str, Condition]:
        """Return the conditions of nodes whose agents have reported, by node."""
        now = self._wall()
        with self._cluster.lock:
            nodes = [
                node
                for node in self._cluster.agents()
                if node.target.owner is None
                and (node.target.node or node.name != node.target.address)
                # Its lines are read again: its present faults are still to come.
                and not (node.up and now - node.clock > AWAY_S)
            ]
            # If two agents have one name, return the one that can be followed.
            nodes.sort(key=lambda node: node.clock)
            recent = {
                name: node
                for name, node in self._nodes.items()
                # On the bus another worker may have the node; its agent may have a new name.
                if not node.target.node and node.name == name and now - node.clock < REMOVED_S
            }
            self._nodes = recent | {node.name: node for node in nodes}
            return {name: _condition(node, now) for name, node in self._nodes.items()}

    async def advance(self) -> None:
        """Write changed conditions. Raises KubernetesError, at the end for a refused condition."""
        now, left, refused = self._wall(), MAX_PER_ROUND, None
        wanted = self.wanted()
        self.known = {name: one for name, one in self.known.items() if name in wanted}
        for name, condition in sorted(wanted.items(), key=self._turn):
            known = self.known.get(name)
            is_old = known is None or now - known.read_at > KNOWN_S
            if left > 0 and is_old:
                known, left = await self._read(name, now), left - 1
            if known and left > 0 and known.condition not in (condition, None):
                left -= 1
                try:
                    await self._write(name, condition, known, now)
                except KubernetesError as error:
                    if not error.is_of_one_object:
                        raise
                    refused = error
        if refused is not None:
            raise refused

    def _turn(self, one: tuple[str, Condition]) -> tuple[bool, float]:
        """Return the order of a node: first the changed conditions, then the oldest read."""
        known = self.known.get(one[0])
        return (True, 0.0) if known is None else (known.condition in (one[1], None), known.read_at)

    async def _read(self, name: str, now: float) -> KnownNode:
        """Read a node; one that the cluster does not have is skipped until the next read."""
        try:
            node = await self._api.ask("GET", node_path(name), shape=_ClusterNode)
            known = _known(node, now)
        except KubernetesError as error:
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
    """Return the node's condition; its fields are empty if it has none."""
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
    # Faults that last until service come before those that only indicate it.
    found = sorted(active, key=lambda one: (one.kind != "device_needs_service", one.time))
    if not found:
        return Condition("True", "NoFault", "no fault of a GPU that needs service")
    reason = "".join(part.title() for part in found[0].kind.split("_"))
    return Condition("False", reason, "; ".join(map(sentence, found))[:1024])


# The key of the taint and of the label; the value is the condition's reason.
KEY = "warpwatch.dev/gpu-fault"
# Pods that run stay; whether to drain is for others to say.
EFFECT = "NoSchedule"


class _Taint(msgspec.Struct):
    key: str


class _NodeSpec(msgspec.Struct):
    taints: list[_Taint] | None = None


class _TaintedNode(msgspec.Struct):
    metadata: Metadata
    spec: _NodeSpec


class _NodeList(msgspec.Struct):
    items: list[_TaintedNode]


class Taints:
    """The taints of nodes. Call ``advance`` after that of the conditions. events: None for none."""

    def __init__(
        self,
        api: KubernetesClient,
        config: KubernetesConfig,
        conditions: Conditions,
        events: EventPublisher | None,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._api = api
        self._config = config
        self._conditions = conditions
        self._events = events
        self._wall = wall
        # In a dry run, the nodes that would be tainted. By node: the last report.
        self._would: set[str] = set()
        self._last_events: dict[str, str] = {}

    async def advance(self, of_others: int) -> int:
        """Set and remove taints. Raises KubernetesError.

        Return how many nodes would be tainted in a dry run; of_others: such nodes of other workers.
        """
        wanted = self._conditions.wanted()
        marked = await self._marked()
        keys = {name: node["spec"].get("taints") or () for name, node in marked.items()}
        tainted = {name for name, own in keys.items() if KEY in [one["key"] for one in own]}
        for name, node in marked.items():
            if self._is_over(name, wanted.get(name)) and not self._config.dry_run:
                await self._change(node, None)
                tainted.discard(name)
                self._say(name, "Untainted", f"the taint {KEY} is gone: the node is well again")
        for name in list(self._would):
            if name not in wanted or self._is_over(name, wanted[name]):
                self._would.remove(name)
                del self._last_events[name]
        count = len(tainted) + len(self._would) + of_others
        for name, condition in wanted.items():
            known = self._conditions.known.get(name)
            is_there = known is not None and known.condition is not None
            if condition.status != "False" or name in marked.keys() | self._would or not is_there:
                continue
            if await self._serve(name, condition, count):
                count += 1
                self._would |= {name} if self._config.dry_run else set()
        return len(self._would)

    async def _marked(self) -> dict[str, Object]:
        """Return the nodes that a fleet has tainted, by name."""
        nodes = await self._api.ask(
            "GET", "/api/v1/nodes", params={"labelSelector": KEY}, shape=_NodeList
        )
        return {node["metadata"]["name"]: node for node in nodes["items"]}

    def _is_over(self, name: str, condition: Condition | None) -> bool:
        """Return whether the node has been well for long enough, by the cluster's own word."""
        known = self._conditions.known.get(name)
        if condition is None or condition.status != "True" or known is None:
            return False
        is_well = known.condition is not None and known.condition.status == "True"
        return is_well and self._wall() - known.since >= self._config.clear_after

    async def _serve(self, name: str, condition: Condition, count: int) -> bool:
        """Return whether the node is tainted now, or would be."""
        limit = self._config.max_tainted
        if count >= limit:
            self._say(name, "NotTainted", f"{condition.reason}: max_tainted is {limit}")
            return False
        if self._config.dry_run:
            self._say(name, "WouldTaint", f"{condition.reason}: {KEY} (fleet.kubernetes.dry_run)")
            return True
        node = await self._api.ask("GET", node_path(name), shape=_TaintedNode)
        await self._change(node, condition.reason)
        self._say(name, "Tainted", f"{condition.reason}: {KEY}:{EFFECT}")
        return True

    async def _change(self, node: Object, reason: str | None) -> None:
        """Patch the node as it was read; later changes by others wait for the next round."""
        about = node["metadata"]
        others = [one for one in node["spec"].get("taints") or () if one["key"] != KEY]
        own = [] if reason is None else [{"key": KEY, "value": reason, "effect": EFFECT}]
        body = {
            "metadata": {"resourceVersion": about["resourceVersion"], "labels": {KEY: reason}},
            "spec": {"taints": [*others, *own]},
        }
        await self._api.ask("PATCH", node_path(about["name"]), body, form=MERGE)

    def _say(self, name: str, reason: str, note: str) -> None:
        """Log a message about a node, once until it changes."""
        if self._last_events.get(name) == f"{reason} {note}":
            return
        self._last_events[name] = f"{reason} {note}"
        logger.warning("node %s: %s: %s", name, reason, note)
        if self._events is not None:
            self._events.put(name, reason, note, warns=reason != "Untainted")
