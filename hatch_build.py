"""Wheel build hook: a released warpwatch requires exactly the client it was built with.

An editable install has client/ on its path already (dev-mode-dirs), so it asks for nothing.
"""

from __future__ import annotations

from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class ClientRequirement(BuildHookInterface):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version != "editable":
            build_data["dependencies"].append(f"warpwatch-client=={self.metadata.version}")
