"""The fleet as a place of captures: its metrics; no rank runs here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from warpwatch_runtime.agent_metrics import AgentMetrics
from warpwatch_telemetry.state import RankState


@dataclass(frozen=True, slots=True)
class FleetBoard:
    """Implements ``warpwatch_capturing.board.Board``."""

    metrics: AgentMetrics

    def ranks(self) -> tuple[RankState, ...]:
        return ()

    def publish(self, **parts: Any) -> None:
        """Ignore the parts: the fleet's state is composed when it is requested."""
