"""What the worker of GPM keeps of a device that it reads, and of a GPU that it gave up."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from warpwatch_devices.nvml.gpm_metrics import GpmRequest
from warpwatch_runtime.call_guard import CallGuard
from warpwatch_telemetry.metric import Values


@dataclass(slots=True, eq=False)
class GpmDevice:
    """A GPU or GPU instance. ``physical`` is the GPU that the calls end at.

    ``earlier`` holds the sample of the time ``sampled_at``; ``spare`` takes the next one.
    """

    uuid: str
    handle: Any
    gpu_instance: int | None
    physical: int
    request: GpmRequest | None = None
    earlier: Any = None
    spare: Any = None
    sampled_at: float | None = None
    polled: bool = True
    retry_at: float = 0.0
    traffic_bytes: dict[str, float] = field(default_factory=dict)
    values: Values = field(default_factory=dict)
    read_at: float = 0.0

    @property
    def buffers(self) -> tuple[Any, ...]:
        return tuple(buffer for buffer in (self.earlier, self.spare) if buffer is not None)


@dataclass(slots=True, eq=False)
class GivenUp:
    """A GPU whose call did not return. ``names``: it and its instances; ``devices``: those of them
    to be read again; ``times``: how often it has come to that; ``back_at``: when to read again."""

    times: int = 0
    guard: CallGuard | None = None
    names: set[str] = field(default_factory=set)
    devices: dict[str, GpmDevice] = field(default_factory=dict)
    back_at: float | None = None

    def due(self, now: float, at_most: int, after_s: float) -> bool:
        """Whether the call has returned ``after_s`` ago, twice as long each time, and the GPU was
        taken back less than ``at_most`` times."""
        if self.guard is None or self.guard.in_flight or self.times > at_most:
            return False
        if self.back_at is None:
            self.back_at = now + after_s * 2 ** (self.times - 1)
        return now >= self.back_at
