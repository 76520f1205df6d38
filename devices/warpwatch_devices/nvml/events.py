"""Receives XIDs and health events from the driver: an event set for each GPU, in one thread.

A GPU's own loop registers its events, since that call reaches the GPU and may hang. The thread only
reads what the driver has queued, so a GPU that is stuck or lost still reports its XIDs, and costs
the others none of theirs.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import pynvml

from warpwatch_devices.nvml.library import CallCosts, Meaning, classify, code_of, meaning_of
from warpwatch_devices.xids import XidLedger
from warpwatch_runtime.supervisor import LoopHandle, LoopRunner

logger = logging.getLogger(__name__)

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

ORIGIN = "nvml"
# Labels of the calls. Waits have their own, because their duration is not the driver's.
READER, WAITING = "events", "event_wait"
POLL_INTERVAL_S = 1.0
# 0 could mean to wait forever, as nvml.h does not say.
POLL_MS = 1
# The limit of events per GPU and round.
MAX_EVENTS = 200
# The pause before a failed registration is repeated.
RETRY_S = 10.0
# The longest wait of ``close`` for a call to return.
CLOSE_TIMEOUT_S = 0.5
_FINAL = (Meaning.UNSUPPORTED, Meaning.NO_PERMISSION)


class GpuEvents:
    """The events of one GPU, also of its MIG instances, in an event set of its own.

    The GPU's loop calls ``register`` and ``renew``, the thread of EventPoller the other methods.
    """

    def __init__(self, uuid: str, pci_bus_id: str, ledger: XidLedger, costs: CallCosts) -> None:
        self.trouble = ""
        self._uuid = uuid
        self._pci_bus_id = pci_bus_id
        self._ledger = ledger
        self._costs = costs
        self._due_at = 0.0
        # The sets that the other thread has not seen yet.
        self._new: deque[Any] = deque()
        self._set: Any = None
        ledger.register(uuid, pci_bus_id)

    def renew(self) -> None:
        """Register again: the set may not get the events of a GPU that came back."""
        self._due_at = 0.0

    def register(self, handle: Any, now: float) -> None:
        """Register the GPU in a new set if that is due. Raises LibraryGone, DeviceGone."""
        if now < self._due_at:
            return
        self._due_at = math.inf
        try:
            mask = WANTED & self._supported(handle)
            if mask:
                self._new.append(self._build(handle, mask))
        except pynvml.NVMLError as error:
            if classify(error) in _FINAL:
                self._give_up(error)
            else:
                self._due_at = now + RETRY_S
            return
        if mask:
            health = [name for bit, name in HEALTH_EVENTS.items() if bit & mask]
            self._ledger.watched(ORIGIN, self._uuid, bool(XID & mask), health)

    def poll(self, now: float, costs: CallCosts) -> None:
        """Hand the queued events to the ledger; rebuild a set that fails after RETRY_S."""
        while self._new:
            self.free()
            self._set = self._new.popleft()
        for _ in range(MAX_EVENTS if self._set is not None else 0):
            try:
                event = costs.time(WAITING, pynvml.nvmlEventSetWait_v2, self._set, POLL_MS)
            except pynvml.NVMLError as error:
                if code_of(error) != pynvml.NVML_ERROR_TIMEOUT:
                    costs.add_error(READER, code_of(error))
                    self._failed(error, now)
                return
            if event.eventType & XID:
                self._ledger.observe(self._pci_bus_id, int(event.eventData), ORIGIN)
            elif event.eventType in HEALTH_EVENTS:
                self._ledger.observe_health(self._uuid, HEALTH_EVENTS[event.eventType])

    def free(self) -> None:
        event_set, self._set = self._set, None
        if event_set is not None:
            with contextlib.suppress(pynvml.NVMLError):
                pynvml.nvmlEventSetFree(event_set)

    def close(self) -> None:
        """Free all sets."""
        self.free()
        while self._new:
            self._set = self._new.popleft()
            self.free()

    def _supported(self, handle: Any) -> int:
        try:
            call = pynvml.nvmlDeviceGetSupportedEventTypes
            return int(self._costs.measure(READER, call, handle))
        except pynvml.NVMLError as error:
            if classify(error) in _FINAL:
                return 0
            raise

    def _build(self, handle: Any, mask: int) -> Any:
        event_set = self._costs.measure(READER, pynvml.nvmlEventSetCreate)
        try:
            call = pynvml.nvmlDeviceRegisterEvents
            self._costs.measure(READER, call, handle, mask, event_set)
        except pynvml.NVMLError:
            with contextlib.suppress(pynvml.NVMLError):
                pynvml.nvmlEventSetFree(event_set)
            raise
        return event_set

    def _failed(self, error: pynvml.NVMLError, now: float) -> None:
        self.free()
        meaning = meaning_of(code_of(error))
        if meaning in _FINAL:
            self._give_up(error)
        elif meaning is not Meaning.LIBRARY:
            self._due_at = now + RETRY_S

    def _give_up(self, error: pynvml.NVMLError) -> None:
        self.trouble = f"XIDs and events are not watched through NVML any more: {error}"


class EventPoller:
    """Polls the event sets of one NVML session."""

    def __init__(
        self,
        supervisor: LoopRunner,
        interval_s: float,
        stuck_after_s: float,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.costs = CallCosts()
        self._supervisor = supervisor
        self._interval_s = min(POLL_INTERVAL_S, interval_s)
        self._stuck_after_s = stuck_after_s
        self._monotonic = monotonic
        self._gpus: list[GpuEvents] = []
        self._logged: set[str] = set()
        self._loop: LoopHandle | None = None

    def start(self) -> None:
        self._loop = self._supervisor.every("nvml-events", self._interval_s, self._poll)

    def add(self, gpu: GpuEvents) -> None:
        """Poll this GPU too."""
        self._gpus.append(gpu)

    @property
    def trouble(self) -> str:
        """The reasons why events are not watched."""
        troubles = {gpu.trouble: None for gpu in tuple(self._gpus) if gpu.trouble}
        if self._loop is not None and self._loop.busy_s > self._stuck_after_s:
            troubles["XIDs and events are not watched: a wait for them does not return"] = None
        return "; ".join(troubles)

    @property
    def in_flight(self) -> bool:
        """After ``close``: whether a call is still inside NVML."""
        return self._loop is not None and self._loop.alive

    def close(self) -> None:
        """Free the sets, unless a call may still use one."""
        if self._loop is not None:
            self._loop.stop(CLOSE_TIMEOUT_S)
        if not self.in_flight:
            for gpu in self._gpus:
                gpu.close()

    def _poll(self) -> None:
        now = self._monotonic()
        for gpu in tuple(self._gpus):
            gpu.poll(now, self.costs)
            if gpu.trouble and gpu.trouble not in self._logged:
                self._logged.add(gpu.trouble)
                logger.warning("%s", gpu.trouble)
