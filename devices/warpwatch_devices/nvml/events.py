"""Receives XIDs and health events from the driver: one event set for all devices, in one thread.

A lost GPU makes every wait return at once. Then the set is built again without the devices that
cannot be registered; these are tried again later, no faster than the back-off allows. Events name a
handle, and a dead GPU cannot be queried: the table of handles is kept from the registration on.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pynvml

from warpwatch_devices.nvml.library import CallCosts, Meaning, address_of, code_of, meaning_of
from warpwatch_devices.source import DeviceSink
from warpwatch_devices.xid_ledger import XidLedger
from warpwatch_runtime.call_guard import CallAbandoned, CallGuard, GuardedLoop
from warpwatch_runtime.supervisor import LoopRunner

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
# The pause before a failed registration is repeated: the first and the longest.
FIRST_RETRY_S = 10.0
LAST_RETRY_S = 300.0


@dataclass(slots=True, eq=False)
class Registration:
    """A GPU whose events are wanted, and its registration in the current set.

    ``registered``: the set has the device. It is not registered before ``retry_at``, and
    ``retry_s`` is the pause after another failure. ``stale``: the set has the device as it was
    before it came back, and may no longer get its events; a new set is due at ``retry_at``.
    """

    uuid: str
    pci_bus_id: str
    handle: Any
    mask: int
    registered: bool = False
    retry_at: float = 0.0
    retry_s: float = FIRST_RETRY_S
    stale: bool = False

    def back_off(self, now: float) -> None:
        self.retry_at = now + self.retry_s
        self.retry_s = min(2 * self.retry_s, LAST_RETRY_S)


@dataclass(slots=True)
class Renewals:
    """Limits how often a GPU that comes back may cause a new event set, which is one for all."""

    next_at: float = 0.0
    pause_s: float = FIRST_RETRY_S

    def schedule(self, now: float) -> float:
        """Return when the new set for a GPU that came back is due; 0 means now."""
        if now < self.next_at:
            return self.next_at
        was_quiet = now - self.next_at > self.pause_s
        self.pause_s = FIRST_RETRY_S if was_quiet else min(2 * self.pause_s, LAST_RETRY_S)
        self.next_at = now + self.pause_s
        return 0.0


ORIGIN = "nvml"
# Labels of the calls. Waits have their own, because their duration is not the driver's.
READER, WAITING = "events", "event_wait"
# The daemon may have to wait this long when it stops; two waits per second need no measurable CPU.
WAIT_S = 0.5
# At a start all devices are registered one after another, but none during a wait. For this time
# after each, waits are short.
SETTLING_S, SETTLING_WAIT_S = 2.0, 0.05
# The limit of events per round.
MAX_EVENTS = 200
FIRST_BACK_OFF_S = 1.0
LAST_BACK_OFF_S = 30.0
# After this time without errors the set works, and the back-off starts again at its first pause.
STEADY_S = 60.0
# The limit of threads that hang in NVML; after the last one events are no longer watched.
MAX_REPLACEMENTS = 8


class _Unusable(Exception):
    """The event set must be freed and built again."""


class EventWatcher:
    """Hands the events of one NVML session to the ledger."""

    def __init__(
        self,
        supervisor: LoopRunner,
        sink: DeviceSink,
        ledger: XidLedger,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._costs = CallCosts()
        loop = (supervisor, "nvml-events", WAIT_S, self._round, MAX_REPLACEMENTS)
        self._loop = GuardedLoop(*loop, monotonic)
        self._monotonic = monotonic
        self._sink = sink
        self._ledger = ledger
        self._lock = threading.Lock()
        self._devices: dict[str, Registration] = {}
        self._by_address: dict[int, Registration] = {}
        self._renewals: dict[str, Renewals] = {}
        # The reason why events are no longer watched.
        self.trouble = ""
        # The set is to be freed and built again in this round.
        self._renew = False
        self._settled_at = 0.0
        self._closed = False
        # Only the loop uses the following attributes.
        self._set: Any = None
        self._built_at = 0.0
        self._build_at = 0.0
        self._back_off_s = 0.0

    def register(self, uuid: str, pci_bus_id: str, handle: Any) -> None:
        """Watch this GPU, also for its MIG instances; a GPU without events is not watched.

        The query for its supported events runs in the caller's thread.
        """
        self._ledger.register(uuid, pci_bus_id)
        mask = WANTED & self._supported(handle)
        if not mask:
            return
        device, address = Registration(uuid, pci_bus_id, handle, mask), address_of(handle)
        with self._lock:
            if self._closed:
                return
            before = self._by_address.get(address)
            if before is not None and (before.registered or before.stale):
                device.stale = True
                renewals = self._renewals.setdefault(uuid, Renewals())
                device.retry_at = renewals.schedule(self._monotonic())
            self._devices[uuid] = device
            self._by_address[address] = device
            self._settled_at = self._monotonic() + SETTLING_S
            self._loop.begin()
            self._loop.wake()

    def forget(self, uuid: str) -> None:
        """Do not register the device again. Events that it still sends are counted."""
        with self._lock:
            self._devices.pop(uuid, None)

    @property
    def in_flight(self) -> bool:
        """Whether a call is inside NVML."""
        return self._loop.in_flight

    def watch(self, stuck_after_s: float) -> None:
        """Replace a thread whose call does not return, and drop the device of that call.

        The watchdog calls this, so it never calls NVML.
        """
        stuck = self._loop.give_up_if_stuck(stuck_after_s + WAIT_S)
        if stuck is None:
            return
        with self._lock:
            if isinstance(stuck, Registration):
                self._devices.pop(stuck.uuid, None)
            self._set = None
            for device in self._devices.values():
                device.registered = device.stale = False
            replaced = self._loop.begin()
        logger.error("NVML events: %s does not return", _name(stuck))
        if not replaced:
            self._give_up(f"{_name(stuck)} does not return")

    def close(self) -> None:
        """Free the set, unless a call may still use it."""
        with self._lock:
            self._closed = True
        if self._loop.close(2 * WAIT_S) and self._set is not None:
            with contextlib.suppress(pynvml.NVMLError):
                pynvml.nvmlEventSetFree(self._set)
            self._set = None

    def _supported(self, handle: Any) -> int:
        costs = CallCosts()  # of the caller's thread
        try:
            return int(costs.measure(READER, pynvml.nvmlDeviceGetSupportedEventTypes, handle))
        except pynvml.NVMLError:
            return 0
        finally:
            costs.drain(self._sink.count)

    def _round(self, guard: CallGuard) -> None:
        if self.trouble or self._monotonic() < self._build_at:
            return
        try:
            if self._renew or self._needs_new_set():
                self._free_set(guard)
            self._ensure_set(guard)
            if self._renew:
                self._loop.wake()
            elif self._set is not None:
                self._wait(guard)
        except _Unusable as unusable:
            self._rebuild_later(guard, unusable)
        self._costs.drain(self._sink.count)

    def _needs_new_set(self) -> bool:
        """Return whether a new set is due for a device that came back."""
        now = self._monotonic()
        with self._lock:
            return any(d.stale and now >= d.retry_at for d in self._devices.values())

    def _ensure_set(self, guard: CallGuard) -> None:
        """Create the set if needed, and register all devices that are due."""
        now = self._monotonic()
        with self._lock:
            missing = [
                device
                for device in self._devices.values()
                if not (device.registered or device.stale) and now >= device.retry_at
            ]
        if missing and self._set is None:
            self._set = self._create(guard)
            self._built_at = now
        for device in missing if self._set is not None else ():
            self._register(guard, device)
        if self._set is not None and now - self._built_at > STEADY_S:
            self._back_off_s = 0.0

    def _create(self, guard: CallGuard) -> Any:
        try:
            return guard.call("creation", self._costs.measure, READER, pynvml.nvmlEventSetCreate)
        except pynvml.NVMLError as error:
            self._judge(error)
            return None

    def _register(self, guard: CallGuard, device: Registration) -> None:
        call = (pynvml.nvmlDeviceRegisterEvents, device.handle, device.mask, self._set)
        try:
            guard.call(device, self._costs.measure, READER, *call)
        except pynvml.NVMLError as error:
            device.back_off(self._monotonic())
            meaning = meaning_of(code_of(error))
            if meaning in (Meaning.UNSUPPORTED, Meaning.NO_PERMISSION):
                self.forget(device.uuid)
            elif meaning is Meaning.LIBRARY:
                self._judge(error)
            elif meaning is Meaning.UNKNOWN:
                # nvml.h: the set is then in an undefined state. Build another without this device.
                self._renew = True
            return
        device.registered, device.retry_s = True, FIRST_RETRY_S
        health = [name for bit, name in HEALTH_EVENTS.items() if bit & device.mask]
        self._ledger.watched(ORIGIN, device.uuid, bool(XID & device.mask), health)

    def _wait(self, guard: CallGuard) -> None:
        """Wait for an event, and handle all that have arrived."""
        settling = self._monotonic() < self._settled_at
        if settling:
            self._loop.wake()
        timeout_ms = round(1000 * (SETTLING_WAIT_S if settling else WAIT_S))
        for _ in range(MAX_EVENTS):
            call = (pynvml.nvmlEventSetWait_v2, self._set, timeout_ms)
            try:
                event = guard.call("wait", self._costs.time, WAITING, *call)
            except pynvml.NVMLError as error:
                if code_of(error) != pynvml.NVML_ERROR_TIMEOUT:
                    self._costs.add_error(READER, code_of(error))
                    self._judge(error)
                return
            self._observe(event)
            timeout_ms = 0

    def _observe(self, event: Any) -> None:
        with self._lock:
            device = self._by_address.get(address_of(event.device))
        if device is None:
            logger.warning("NVML event of an unknown device: type 0x%x", event.eventType)
        elif event.eventType & XID:
            self._ledger.observe(device.pci_bus_id, int(event.eventData), ORIGIN)
        elif event.eventType in HEALTH_EVENTS:
            self._ledger.observe_health(device.uuid, HEALTH_EVENTS[event.eventType])

    def _judge(self, error: pynvml.NVMLError) -> None:
        """Raise _Unusable, or end the watcher if NVML itself is gone or has no events."""
        meaning = meaning_of(code_of(error))
        if meaning in (Meaning.LIBRARY, Meaning.UNSUPPORTED, Meaning.NO_PERMISSION):
            # All readers report a missing library.
            level = logging.INFO if meaning is Meaning.LIBRARY else logging.WARNING
            self._give_up(str(error), level)
        else:
            raise _Unusable(str(error)) from error

    def _give_up(self, reason: str, level: int = logging.WARNING) -> None:
        self.trouble = f"XIDs and events are not watched through NVML any more: {reason}"
        logger.log(level, "%s", self.trouble)

    def _rebuild_later(self, guard: CallGuard, unusable: _Unusable) -> None:
        """Free the set and build another: at once the first time, then after the back-off.

        Events that happen without a set are lost.
        """
        wait_s = self._back_off_s
        self._back_off_s = min(max(2 * wait_s, FIRST_BACK_OFF_S), LAST_BACK_OFF_S)
        self._build_at = self._monotonic() + wait_s
        if wait_s == 0.0:
            logger.warning("NVML events: %s; the event set is built again", unusable)
            self._loop.wake()
        with contextlib.suppress(CallAbandoned):
            self._free_set(guard)

    def _free_set(self, guard: CallGuard) -> None:
        with self._lock:
            event_set, self._set = self._set, None
            self._renew = False
            for device in (*self._devices.values(), *self._by_address.values()):
                device.registered = False
                if device.stale:
                    device.stale, device.retry_at = False, 0.0
        if event_set is not None:
            with contextlib.suppress(pynvml.NVMLError):
                guard.call("release", self._costs.time, READER, pynvml.nvmlEventSetFree, event_set)


def _name(stuck: object) -> str:
    if isinstance(stuck, Registration):
        return f"the registration of device {stuck.uuid}"
    return f"the {stuck} of the event set"
