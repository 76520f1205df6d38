"""The events that are asked for, what is kept of a device for them, and when it is tried again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pynvml

XID = pynvml.nvmlEventTypeXidCriticalError
# The values of the label ``event``, by nvml.h's bits (nvmlEventType*).
HEALTH_EVENTS: dict[int, str] = {
    pynvml.nvmlEventTypeSingleBitEccError: "single_bit_ecc",
    pynvml.nvmlEventTypeDoubleBitEccError: "double_bit_ecc",
    pynvml.nvmlEventTypeSingleBitEccErrorStorm: "single_bit_ecc_storm",
    pynvml.nvmlEventTypeDramRetirementEvent: "dram_retirement",
    pynvml.nvmlEventTypeDramRetirementFailure: "dram_retirement_failure",
    pynvml.nvmlEventTypeNonFatalPoisonError: "non_fatal_poison",
    pynvml.nvmlEventTypeFatalPoisonError: "fatal_poison",
    pynvml.nvmlEventTypeGpuUnavailableError: "gpu_unavailable",
    pynvml.nvmlEventTypeGpuRecoveryAction: "recovery_action",
}
WANTED = XID | sum(HEALTH_EVENTS)
# How long a device that could not be registered is left alone: the first time, and at most.
FIRST_RETRY_S = 10.0
LAST_RETRY_S = 300.0


@dataclass(slots=True, eq=False)
class EventDevice:
    """``registered``: in the present set. ``retry_at``: not to be registered before; after
    another failure, ``retry_s`` later. ``stale``: in the present set as it was before it came
    back, when it may send nothing any more: at ``retry_at`` there must be a new set."""

    uuid: str
    pci_bus_id: str
    handle: Any
    mask: int
    registered: bool = False
    retry_at: float = 0.0
    retry_s: float = FIRST_RETRY_S
    stale: bool = False

    def leave_alone(self, now: float) -> None:
        self.retry_at = now + self.retry_s
        self.retry_s = min(2 * self.retry_s, LAST_RETRY_S)


@dataclass(slots=True)
class Renewals:
    """Of a GPU that comes back: when it may cost all the others a new set again."""

    next_at: float = 0.0
    pause_s: float = FIRST_RETRY_S

    def take(self, now: float) -> float:
        """When the next one is due; 0: now."""
        if now < self.next_at:
            return self.next_at
        was_quiet = now - self.next_at > self.pause_s
        self.pause_s = FIRST_RETRY_S if was_quiet else min(2 * self.pause_s, LAST_RETRY_S)
        self.next_at = now + self.pause_s
        return 0.0
