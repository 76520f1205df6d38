"""``GET /`` of a fleet."""

from __future__ import annotations

from pathlib import Path

from warpwatch_fleet.page import heatmap, nodes
from warpwatch_serving.page.endpoint import PageEndpoint
from warpwatch_serving.watcher import Watcher


class FleetPage(PageEndpoint):
    templates = (Path(__file__).parent / "templates", *PageEndpoint.templates)
    name = "fleet.html"

    def __init__(self, fleet: Watcher) -> None:
        super().__init__(fleet)
        self.modules = {"heatmap": heatmap, "nodes": nodes}
