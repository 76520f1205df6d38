"""One file per way out; each turns what is known into somebody else's format.

- base: what a way out is
- series: every series of a state, for the formats that are made of series
- prometheus: text exposition and OpenMetrics
- jsonl: the telemetry log
- grafana, grafana_api: annotations
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from warpwatch_exporters.base import Renderer, Writer
from warpwatch_exporters.jsonl import JsonlWriter
from warpwatch_exporters.prometheus import render

# The ways out by their section in the configuration.
RENDERERS: Mapping[str, Renderer] = {"prometheus": render}
WRITERS: Mapping[str, Callable[[Path], Writer]] = {"jsonl": JsonlWriter}
