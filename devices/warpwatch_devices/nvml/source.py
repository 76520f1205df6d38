"""Reads NVIDIA GPUs through NVML in a loop per device, so that one that fails delays no other.

The manager's loop keeps the library initialised. The watchdog's loop never calls NVML: it reports
devices whose call does not return, and devices that have disappeared.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from warpwatch_devices.config import NvmlConfig
from warpwatch_devices.nvml.device import NvmlDevice
from warpwatch_devices.nvml.library import (
    NvmlUnavailable,
    VersionMismatch,
    count_devices,
    initialise,
    shut_down,
)
from warpwatch_devices.nvml.session import NvmlSession
from warpwatch_devices.source import Sink, SourceContext
from warpwatch_devices.xid_ledger import XidLedger
from warpwatch_runtime.supervisor import LoopHandle, LoopRunner
from warpwatch_telemetry.samples import Device, DeviceSample, SourceHealth

logger = logging.getLogger(__name__)


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
        self._ailment = ""
        self._since = 0.0
        self._failed = False

    def consider(self, ailment: str) -> None:
        """Note the current fault in one line; empty means none."""
        now = self._monotonic()
        if ailment != self._ailment:
            self._ailment, self._since = ailment, now
        if ailment and now - self._since >= self._grace_s and not self._failed:
            self._failed = True
            self._fail(ailment)


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
        if self._session is not None and self._session.gone:
            self._leave(sink)
        self._release()
        if self._session is None and self._monotonic() >= self._retry_at:
            self._try(supervisor, sink)
        if self._session is not None:
            self._session.drain(sink)
        self._last_resort.consider(self._ailment())
        sink.publish_health(self._health())

    def _leave(self, sink: Sink) -> None:
        session, self._session = self._session, None
        assert session is not None
        # The watchdog may have missed the newest devices.
        self._remember(session.devices)
        session.drain(sink)
        self._errors += session.errors + 1
        self._unavailable("the driver went away")
        session.end(self._config.stuck_after_s)
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
        try:
            self._session = self._begin(supervisor, sink)
            self._reason = ""
            self._mismatched = False
        except VersionMismatch as mismatch:
            self._mismatched = True
            grace_s = self._config.mismatch_grace_s
            self._unavailable(f"{mismatch}; the daemon ends after {grace_s:g} s of it")
        except NvmlUnavailable as unavailable:
            self._mismatched = False
            self._unavailable(f"{unavailable}; {_BLOCKED}" if self._left else str(unavailable))

    def _begin(self, supervisor: LoopRunner, sink: Sink) -> NvmlSession:
        initialise()
        try:
            count = count_devices()
        except NvmlUnavailable:
            shut_down()
            raise
        session = NvmlSession(
            *(supervisor, sink, self._ledger, self._config), self._monotonic, self._wall
        )
        session.begin(count)
        return session

    def _ailment(self) -> str:
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
        reason = session.trouble if session.loops else "the driver has no device"
        return SourceHealth(self.name, True, reason, session.slowest_s, errors)

    def _watch(self, manager: LoopHandle, sink: Sink) -> None:
        if manager.busy_s > self._config.stuck_after_s:
            reason = "NVML does not answer"
            sink.publish_health(SourceHealth(self.name, False, reason, errors=self._errors))
        session = self._session
        if session is not None:
            session.watch()
        self._speak_for_missing(session, sink)

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

    def _speak_for_missing(self, session: NvmlSession | None, sink: Sink) -> None:
        """Report devices that have disappeared as down; removed MIG devices end cleanly."""
        gpus = session.devices if session else ()
        present = self._remember(gpus)
        settled = {gpu.device.uuid for gpu in gpus if gpu.settled}
        # While devices are still being opened, one of them may be the missing one.
        complete = session and all(gpu.known or gpu.reason for gpu in gpus)
        reason = "lost" if complete else "driver"
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
