"""``GET /`` of a fleet."""

from __future__ import annotations

from pathlib import Path

from warpwatch_fleet.page import heatmap, nodes
from warpwatch_serving.backend import ApiBackend
from warpwatch_serving.page.endpoint import PageEndpoint


class FleetPage(PageEndpoint):
    templates = (Path(__file__).parent / "templates", *PageEndpoint.templates)
    name = "fleet.html"

    def __init__(self, fleet: ApiBackend) -> None:
        super().__init__(fleet)
        self.modules = {"heatmap": heatmap, "nodes": nodes}
