"""The interfaces between captures and the process that they run in."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from warpwatch_capturing.config import TriggersConfig
from warpwatch_runtime.agent_metrics import AgentMetrics
from warpwatch_telemetry.captures import Capture, CaptureRequest
from warpwatch_telemetry.jobs import JobId
from warpwatch_telemetry.state import RankState


class Board(Protocol):
    """The state of the process. Every method may be called from any thread."""

    @property
    def metrics(self) -> AgentMetrics: ...

    def ranks(self) -> tuple[RankState, ...]:
        """Return the ranks that are available now."""

    def publish(self, **parts: Any) -> None:
        """Replace fields of the state, such as ``captures`` or ``decisions``."""


class RunningRank(Protocol):
    """A rank that runs here.

    recent: the durations of its newest steps, in seconds. device: the UUID of its GPU.
    """

    status: str

    @property
    def recent(self) -> Iterable[float]: ...

    @property
    def world_size(self) -> int: ...

    @property
    def device(self) -> str | None: ...


class RunningRanks(Protocol):
    """The ranks that run here, by job."""

    def targets(self, job: JobId) -> Mapping[int, RunningRank]:
        """Return the job's live ranks by number."""


class Capturer(Protocol):
    """The service of a node or the captures of a fleet, for those that request captures.

    config: a reload replaces it.
    """

    @property
    def config(self) -> TriggersConfig: ...

    def request(self, request: CaptureRequest) -> Capture:
        """Start a capture. Raises Refused."""

    def captures(self) -> Sequence[Capture]:
        """Return all captures, oldest first."""

    def capture(self, capture_id: str) -> Capture | None:
        """Return a capture by its id."""

    def is_busy(self, job: JobId) -> bool:
        """Return whether a capture of the job runs."""
