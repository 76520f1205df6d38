"""Provides what the capture service needs of a fleet: store, policy, metrics and board."""

from __future__ import annotations

import atexit
import logging
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import Any

from warpwatch_capturing.config import StoreConfig, TriggersConfig
from warpwatch_capturing.store import Store
from warpwatch_fleet.config import FleetFile
from warpwatch_runtime.agent_metrics import AgentMetrics
from warpwatch_telemetry.captures import CaptureRequest, Decision
from warpwatch_telemetry.errors import UsageError
from warpwatch_telemetry.state import RankState

logger = logging.getLogger(__name__)


def open_store(config: FleetFile) -> Store:
    """Open the store in ``fleet.state_dir``, or else one that lasts until the fleet ends."""
    try:
        return Store(_at(config, config.fleet.state_dir))
    except UsageError as error:
        logger.warning("captures are not kept over a restart; set fleet.state_dir: %s", error)
        folder = tempfile.TemporaryDirectory(prefix="warpwatch-fleet-")
        atexit.register(folder.cleanup)
        return Store(_at(config, Path(folder.name)))


def _at(config: FleetFile, folder: Path) -> StoreConfig:
    return config.store.model_copy(update={"url": (folder.absolute() / "captures").as_uri()})


class FleetMetrics(AgentMetrics):
    """The metrics of a fleet.

    Each agent counts its part of a capture; if the fleet counted it too, sums would be too high.
    Only captures that a restart interrupted are counted here: no agent sees that.
    """

    def count_capture(self, kind: str, trigger: str, outcome: str, owner: str) -> None:
        """Do nothing."""


class FleetBoard:
    """A ``warpwatch_capturing.board.Board`` without ranks: none runs in the fleet's process."""

    def __init__(self, metrics: AgentMetrics) -> None:
        self.metrics = metrics
        self.decisions: tuple[Decision, ...] = ()

    def ranks(self) -> tuple[RankState, ...]:
        """Return no ranks."""
        return ()

    def publish(self, **parts: Any) -> None:
        """Keep the decisions; the rest of the state is composed when it is requested."""
        self.decisions = parts.get("decisions", self.decisions)


class AgentsDecide:
    """A policy without limits: each agent applies its own to the capture's part on its node."""

    def __init__(self, config: TriggersConfig) -> None:
        self.config = config

    def check(self, request: CaptureRequest, busy: Collection[int], at: float) -> None:
        """Allow the capture."""

    def add_start(self, request: CaptureRequest, at: float) -> None:
        """Count nothing."""

    def remove_start(self, request: CaptureRequest, at: float) -> None:
        """Count nothing."""
