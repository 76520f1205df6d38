"""Nodes' names: each belongs to the one agent that has it now."""

from __future__ import annotations

import re
from typing import Protocol

from warpwatch_fleet.agent_link import AgentError

# A DNS name as hosts have it, with underscores. It is safe in a path, a label and a sentence.
_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,251}[A-Za-z0-9])?")


class Holder(Protocol):
    name: str
    up: bool


class NodeNames:
    """The agent that has each name. A name is free again once its agent cannot be followed."""

    def __init__(self) -> None:
        self._holders: dict[str, Holder] = {}

    def claim(self, name: str, agent: Holder) -> None:
        """Give the name to the agent, in the place of the one that it had. Raises AgentError."""
        if not _NAME.fullmatch(name):
            raise AgentError(f"{name[:64]!r} is not a node's name; set `node` to a DNS name")
        holder = self._holders.get(name)
        if holder is not None and holder is not agent and holder.up:
            raise AgentError(f"another agent says that it is on {name}")
        self.release(agent)
        self._holders[name] = agent

    def release(self, agent: Holder) -> None:
        """Free the name that the agent has."""
        if self._holders.get(agent.name) is agent:
            del self._holders[agent.name]

    def has(self, name: str) -> bool:
        """Return whether an agent of a node has the name."""
        return name in self._holders
