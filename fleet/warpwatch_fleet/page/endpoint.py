"""``GET /`` of a fleet."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from warpwatch_fleet.page import heatmap, nodes
from warpwatch_fleet.page.headline import headline
from warpwatch_serving.page.endpoint import PageEndpoint
from warpwatch_serving.page.headline import Headline
from warpwatch_serving.watcher import Watcher
from warpwatch_telemetry.state import State


class FleetPage(PageEndpoint):
    templates = (Path(__file__).parent / "templates", *PageEndpoint.templates)
    name = "fleet.html"

    def __init__(self, fleet: Watcher) -> None:
        super().__init__(fleet)
        self.modules = {"heatmap": heatmap, "nodes": nodes}

    def nodes(self, state: State) -> Collection[str]:
        return {source.name for source in state.sources}

    def headline(self, state: State) -> Headline:
        return headline(state)
