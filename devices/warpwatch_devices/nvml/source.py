"""Reads NVIDIA GPUs through NVML in a loop per device, so that one that fails delays no other.

The manager's loop keeps NVML initialised. Devices that come, go or change places are met as a
driver that was loaded again is: by another session. The watchdog's loop never calls NVML: it
reports devices whose call does not return, and devices that have disappeared.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

import pynvml

from warpwatch_devices.config import NvmlConfig
from warpwatch_devices.nvml.device import DeviceContext, DeviceMemory, NvmlDevice
from warpwatch_devices.nvml.events import EventPoller
from warpwatch_devices.nvml.gpm import GpmTurns
from warpwatch_devices.nvml.library import (
    CallCosts,
    Meaning,
    NvmlUnavailable,
    VersionMismatch,
    code_of,
    count_devices,
    initialise,
    meaning_of,
    shut_down,
)
from warpwatch_devices.source import DeviceSink, Sink, SourceContext
from warpwatch_devices.xids import XidLedger
from warpwatch_runtime.supervisor import LoopHandle, LoopRunner
from warpwatch_telemetry.samples import Device, DeviceSample, SourceHealth

logger = logging.getLogger(__name__)


class SessionSink:
    """Forwards to ``sink`` until ``close``, so that a call which returns late publishes nothing."""

    def __init__(self, sink: DeviceSink) -> None:
        self._sink = sink
        self._lock = threading.Lock()
        self._closed = False

    def close(self) -> None:
        """Close; nothing is published after the return."""
        with self._lock:
            self._closed = True

    def publish_device(self, sample: DeviceSample) -> None:
        with self._lock:
            if not self._closed:
                self._sink.publish_device(sample)

    def forget_device(self, uuid: str, source: str = "nvml") -> None:
        with self._lock:
            if not self._closed:
                self._sink.forget_device(uuid, source)


# How often devices are counted, and the label of that call.
SCAN_INTERVAL_S = 10.0
SCAN_READER = "scan"


class NvmlSession:
    """The devices of one initialisation of NVML, each in a loop of its own.

    Another one is begun if NVML is ``gone``, or if the devices have ``changed`` and no call is
    ``stuck``. NVML may be shut down once nothing is ``in_flight``.
    """

    def __init__(
        self,
        supervisor: LoopRunner,
        sink: Sink,
        count: int,
        config: NvmlConfig,
        ledger: XidLedger,
        memories: dict[str, DeviceMemory],
        monotonic: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._monotonic = monotonic
        self._raw_sink, self._sink = sink, SessionSink(sink)
        self._count = count
        self._stuck_after_s = config.stuck_after_s
        self._costs = CallCosts()
        self._library_gone = self._recounted = False
        self._scan_at = monotonic() + SCAN_INTERVAL_S
        interval_s = config.interval_s
        self._events = EventPoller(supervisor, interval_s, config.stuck_after_s, monotonic)
        clocks = (monotonic, wall)
        shared = DeviceContext(self._sink, ledger, self._events, memories, GpmTurns(), *clocks)
        self.devices = tuple(NvmlDevice(index, shared, interval_s) for index in range(count))
        self._loops = tuple(
            supervisor.every(f"nvml-{index}", interval_s, device.step)
            for index, device in enumerate(self.devices)
        )
        if count:
            self._events.start()
        logger.info("NVML has %d devices", count)

    def scan(self) -> None:
        """Count the devices now and then. This call reaches no device."""
        if self._monotonic() < self._scan_at or self.gone:
            return
        self._scan_at = self._monotonic() + SCAN_INTERVAL_S
        try:
            count = self._costs.measure(SCAN_READER, pynvml.nvmlDeviceGetCount)
            self._recounted = count != self._count
        except pynvml.NVMLError as error:
            self._library_gone = meaning_of(code_of(error)) is Meaning.LIBRARY

    @property
    def gone(self) -> bool:
        """Whether NVML must be initialised again."""
        return self._library_gone or any(device.library_gone for device in self.devices)

    @property
    def changed(self) -> bool:
        """Whether devices have come, gone or changed places."""
        return self._recounted or any(device.replaced for device in self.devices)

    @property
    def stuck(self) -> bool:
        return any(loop.busy_s > self._stuck_after_s for loop in self._loops)

    @property
    def works(self) -> bool:
        """Whether a device is read, or there is none to read."""
        return not self.gone and (not self.devices or any(d.settled for d in self.devices))

    @property
    def unreadable(self) -> bool:
        """Whether every call of every device fails, for no reason that NVML has a name for."""
        devices = self.devices
        return bool(devices) and all(d.reason == "driver" and not d.library_gone for d in devices)

    @property
    def trouble(self) -> str:
        """The faults outside of the devices."""
        if self.changed:
            return "devices have come or gone; they are searched once no call is stuck any more"
        return self._events.trouble

    @property
    def errors(self) -> int:
        return sum(costs.errors for costs in self._all_costs())

    @property
    def slowest_s(self) -> float:
        return max((loop.last_duration_s for loop in self._loops), default=0.0)

    @property
    def in_flight(self) -> bool:
        """After ``end``: whether a call is inside NVML still."""
        return self._events.in_flight or any(loop.alive for loop in self._loops)

    def drain(self, sink: Sink) -> None:
        for costs in self._all_costs():
            costs.drain(sink.count)

    def watch(self) -> None:
        """Report the devices whose call does not return. Never calls NVML."""
        for device, loop in zip(self.devices, self._loops, strict=True):
            if loop.busy_s > self._stuck_after_s:
                device.publish_stuck()

    def end(self, timeout_s: float) -> None:
        """Stop the loops, and wait at most ``timeout_s`` for all of them."""
        deadline = self._monotonic() + timeout_s
        self._sink.close()
        for loop in self._loops:
            loop.stop()
        self._events.close()
        for device, loop in zip(self.devices, self._loops, strict=True):
            loop.stop(max(0.0, deadline - self._monotonic()))
            if not loop.alive:
                device.close()
            if not device.known:
                self._raw_sink.forget_device(device.device.uuid)

    def _all_costs(self) -> tuple[CallCosts, ...]:
        return (self._costs, self._events.costs, *(device.costs for device in self.devices))


class LastResort:
    """Calls ``fail`` once with a fault that has lasted for ``grace_s``."""

    def __init__(
        self,
        fail: Callable[[str], None],
        grace_s: float,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fail = fail
        self._monotonic = monotonic
        self._grace_s = grace_s
        self._fault = ""
        self._since = 0.0
        self._failed = False

    def consider(self, fault: str) -> None:
        """Note the current fault in one line; empty means none."""
        now = self._monotonic()
        if fault != self._fault:
            self._fault, self._since = fault, now
        if fault and now - self._since >= self._grace_s and not self._failed:
            self._failed = True
            self._fail(fault)


# The pause before NVML is initialised again.
RETRY_INTERVAL_S = 5.0

# The wait for calls when the process ends; the supervisor has waited before.
CLOSE_TIMEOUT_S = 0.5

# Faults that only a restart fixes.
_UPGRADED = (
    "the NVIDIA driver was upgraded under this process: kernel module and library differ; "
    "restarting picks the new library up"
)
_BLOCKED = (
    "a stuck driver call prevents NVML from being restarted in this process; "
    "restarting the daemon helps"
)
_UNREADABLE = (
    "no GPU can be read any more: every call fails without a known reason; the container lost its "
    "devices, as when systemd reloads on the host; restarting it helps"
)


class NvmlSource:
    """Starts without a driver and recovers by itself when there is one."""

    name = "nvml"

    def __init__(
        self,
        config: NvmlConfig,
        context: SourceContext,
        ledger: XidLedger,
        *,
        monotonic: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._monotonic, self._wall = monotonic, wall
        self._config = config
        self._context = context
        self._ledger = ledger
        self._retry_at = 0.0
        self._reason = ""
        self._errors = 0
        self._mismatched = False
        self._last_resort = LastResort(context.fail, config.mismatch_grace_s, monotonic)
        self._session: NvmlSession | None = None
        self._memories: dict[str, DeviceMemory] = {}
        # Ended sessions with a call inside NVML: each keeps its initialisation.
        self._left: list[NvmlSession] = []
        # All devices so far, with the UUID of their GPU.
        self._known: dict[str, tuple[Device, str]] = {}

    def start(self, supervisor: LoopRunner, sink: Sink) -> None:
        interval_s = self._config.interval_s
        manager = supervisor.every(
            "nvml", min(1.0, interval_s), lambda: self._manage(supervisor, sink)
        )
        supervisor.every("nvml-watchdog", min(0.5, interval_s), lambda: self._watch(manager, sink))

    def close(self) -> None:
        """Leave NVML, unless a call is still in it: then the process's exit does."""
        session, self._session = self._session, None
        if session is not None:
            session.end(CLOSE_TIMEOUT_S)
            self._left.append(session)
        self._release()

    def _manage(self, supervisor: LoopRunner, sink: Sink) -> None:
        session = self._session
        if session is not None:
            session.scan()
            if session.gone:
                self._session = None
                self._errors += 1
                self._unavailable("the driver went away")
                self._leave(session, sink)
            elif session.changed and not session.stuck:
                logger.info("devices have come, gone or changed places")
                self._leave(session, sink)
                self._release()
                self._try(supervisor, sink)
        self._release()
        if self._session is None and self._monotonic() >= self._retry_at:
            self._try(supervisor, sink)
        if self._session is not None:
            self._session.drain(sink)
        self._last_resort.consider(self._lasting_fault())
        sink.publish_health(self._health())

    def _leave(self, session: NvmlSession, sink: Sink) -> None:
        # The watchdog may have missed the newest devices.
        self._remember(session.devices)
        session.end(self._config.stuck_after_s)
        session.drain(sink)
        self._errors += session.errors
        self._left.append(session)

    def _release(self) -> None:
        """Shut NVML down for each finished session that has no call in it.

        NVML counts initialisations, and only the one after the last shutdown is real. So a single
        stuck call keeps all later sessions from a new driver.
        """
        for session in tuple(self._left):
            if not session.in_flight:
                self._left.remove(session)
                shut_down()
                # After a driver upgrade the next attempt is immediate.
                self._retry_at = self._monotonic()

    def _try(self, supervisor: LoopRunner, sink: Sink) -> None:
        self._mismatched = False
        try:
            self._session = self._begin(supervisor, sink)
            self._reason = ""
            return
        except VersionMismatch as mismatch:
            self._mismatched = True
            grace_s = self._config.mismatch_grace_s
            reason = f"{mismatch}; the daemon ends after {grace_s:g} s of it"
        except NvmlUnavailable as unavailable:
            reason = f"{unavailable}; {_BLOCKED}" if self._left else str(unavailable)
        self._session = None
        self._unavailable(reason)

    def _begin(self, supervisor: LoopRunner, sink: Sink) -> NvmlSession:
        initialise()
        try:
            count = count_devices()
        except NvmlUnavailable:
            shut_down()
            raise
        of_source = (self._config, self._ledger, self._memories, self._monotonic, self._wall)
        return NvmlSession(supervisor, sink, count, *of_source)

    def _lasting_fault(self) -> str:
        """Return the fault that only a restart fixes, or nothing."""
        if self._mismatched:
            return _UPGRADED
        session = self._session
        if self._left and (session is None or not session.works):
            return _BLOCKED
        return _UNREADABLE if self._unreadable() else ""

    def _unreadable(self) -> bool:
        """Return whether no device can be read, although some could before."""
        return self._session is not None and self._session.unreadable and bool(self._known)

    def _unavailable(self, reason: str) -> None:
        if reason != self._reason:
            logger.warning("no NVML: %s", reason)
        self._reason = reason
        self._retry_at = self._monotonic() + RETRY_INTERVAL_S

    def _health(self) -> SourceHealth:
        session = self._session
        if session is None:
            return SourceHealth(self.name, False, self._reason, errors=self._errors)
        errors = self._errors + session.errors
        if self._unreadable():
            return SourceHealth(self.name, False, _UNREADABLE, session.slowest_s, errors)
        reason = session.trouble if session.devices else "the driver has no device"
        return SourceHealth(self.name, True, reason, session.slowest_s, errors)

    def _watch(self, manager: LoopHandle, sink: Sink) -> None:
        if manager.busy_s > self._config.stuck_after_s:
            reason = "NVML does not answer"
            sink.publish_health(SourceHealth(self.name, False, reason, errors=self._errors))
        session = self._session
        if session is not None:
            session.watch()
        self._report_missing(session, sink)

    def _remember(self, gpus: tuple[NvmlDevice, ...]) -> set[str]:
        """Note the current devices; return their UUIDs."""
        there = {
            device.uuid: (device, gpu.device.uuid)
            for gpu in gpus
            if gpu.known
            for device in gpu.devices
        }
        self._known.update(there)
        return set(there)

    def _report_missing(self, session: NvmlSession | None, sink: Sink) -> None:
        """Report devices that have disappeared as down; removed MIG devices end cleanly."""
        gpus = session.devices if session else ()
        present = self._remember(gpus)
        settled = {gpu.device.uuid for gpu in gpus if gpu.settled}
        unread = [gpu for gpu in gpus if not gpu.settled and not gpu.reason]
        if not all(gpu.stuck for gpu in unread):
            # One that is read for the first time now may be the missing one.
            return
        reason = "driver" if unread or session is None else "lost"
        for uuid, (device, gpu_uuid) in tuple(self._known.items()):
            if uuid in present:
                continue
            if gpu_uuid in settled:
                del self._known[uuid]
                sink.forget_device(uuid)
                continue
            values = self._ledger.values(uuid)
            gone = DeviceSample(device, self._wall(), values, up=False, reason=reason)
            sink.publish_device(gone)
