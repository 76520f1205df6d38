"""The events of NVML that are asked for, and what they are called."""

from __future__ import annotations

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
