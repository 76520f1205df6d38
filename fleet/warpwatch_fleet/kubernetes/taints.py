"""Taints of nodes whose hardware must be served: few at once, and only those that are its own.

All that it has done is on the nodes: the taint, and a label by which they are found again. A taint
that a person takes away stays away while the label says that this fault has been dealt with.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import msgspec

from warpwatch_fleet.config import KubernetesConfig
from warpwatch_fleet.kubernetes.api import MERGE, Api, Metadata, Object, node_path
from warpwatch_fleet.kubernetes.conditions import Condition, Conditions
from warpwatch_fleet.kubernetes.events import Events

logger = logging.getLogger(__name__)

# Of the taint and of the label; the value is the reason of the condition.
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
    """``advance`` after that of the conditions. events: None where none are wanted."""

    def __init__(
        self,
        api: Api,
        config: KubernetesConfig,
        conditions: Conditions,
        events: Events | None,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._api = api
        self._config = config
        self._conditions = conditions
        self._events = events
        self._wall = wall
        # Of a dry run, what would be tainted; by node, what was last said of it.
        self._would: set[str] = set()
        self._said: dict[str, str] = {}

    async def advance(self) -> None:
        """Raises ApiError."""
        wanted = self._conditions.wanted()
        marked = await self._marked()
        tainted = {name for name, node in marked.items() if _is_tainted(node)}
        for name, node in marked.items():
            if self._is_over(name, wanted.get(name)) and not self._config.dry_run:
                await self._change(node, None)
                tainted.discard(name)
                self._say(name, "Untainted", f"the taint {KEY} is gone: the node is well again")
        self._would = {name for name in self._would if not self._is_over(name, wanted.get(name))}
        for name, condition in wanted.items():
            if condition.status == "False" and name not in marked.keys() | self._would:
                count = len(tainted | self._would)
                if await self._serve(name, condition, count):
                    (self._would if self._config.dry_run else tainted).add(name)

    async def _marked(self) -> dict[str, Object]:
        """By name, nodes that a fleet has tainted, as they are now."""
        nodes = await self._api.ask(
            "GET", "/api/v1/nodes", params={"labelSelector": KEY}, shape=_NodeList
        )
        return {node["metadata"]["name"]: node for node in nodes["items"]}

    def _is_over(self, name: str, condition: Condition | None) -> bool:
        """Whether the node has been well for long enough, by the cluster's own word."""
        known = self._conditions.known.get(name)
        if condition is None or condition.status != "True" or known is None:
            return False
        is_well = known.condition is not None and known.condition.status == "True"
        return is_well and self._wall() - known.since >= self._config.clear_after

    async def _serve(self, name: str, condition: Condition, count: int) -> bool:
        """Whether the node is tainted now, or would be."""
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
        """Of the node as it was read; what another has changed since is for the next round."""
        about = node["metadata"]
        others = [one for one in node["spec"].get("taints") or () if one["key"] != KEY]
        own = [] if reason is None else [{"key": KEY, "value": reason, "effect": EFFECT}]
        body = {
            "metadata": {"resourceVersion": about["resourceVersion"], "labels": {KEY: reason}},
            "spec": {"taints": [*others, *own]},
        }
        await self._api.ask("PATCH", node_path(about["name"]), body, form=MERGE)

    def _say(self, name: str, reason: str, note: str) -> None:
        """Once, until something else is to be said of the node."""
        if self._said.get(name) == f"{reason} {note}":
            return
        self._said[name] = f"{reason} {note}"
        logger.warning("node %s: %s: %s", name, reason, note)
        if self._events is not None:
            self._events.put(name, reason, note, warns=reason != "Untainted")


def _is_tainted(node: Object) -> bool:
    return any(one["key"] == KEY for one in node["spec"].get("taints") or ())
