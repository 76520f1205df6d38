"""Counts every XID once, from all origins; it outlives the sessions of NVML.

An XID may come as an event of NVML and again as a line of the kernel log. Two reports of the same
GPU and number within a few seconds are one XID if their origins differ, and two if not.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from warpwatch_telemetry.metric import SeriesKey
from warpwatch_telemetry.xids import COUNTED_FROM_START, explain

logger = logging.getLogger(__name__)

# How far apart the two origins may report the same XID.
SAME_EVENT_S = 5.0
# The same XID of the same GPU is logged once in this time.
LOG_INTERVAL_S = 60.0
# Bounds of what is kept: addresses (with or without a device), and XID numbers of each.
MAX_ADDRESSES = 256
MAX_XIDS = 128
MAX_UNMATCHED = 256

_ADDRESS = re.compile(r"(?:([0-9a-f]{1,8}):)?([0-9a-f]{1,4}):([0-9a-f]{1,2})(?:\.[0-7])?", re.I)


def normalised_address(pci_bus_id: str) -> str:
    """Return ``0000:1a:00`` for every spelling of it; other texts stay unchanged."""
    match = _ADDRESS.fullmatch(pci_bus_id.strip())
    if match is None:
        return pci_bus_id
    domain, bus, device = (int(part or "0", 16) for part in match.groups())
    return f"{domain:04x}:{bus:02x}:{device:02x}"


@dataclass(slots=True)
class _Xid:
    """How often, when last (wall clock; None: never), and what one origin alone has reported."""

    total: int = 0
    last_time: float | None = None
    logged_at: float | None = None
    unmatched: list[tuple[float, str]] = field(default_factory=list)


class XidLedger:
    """The XIDs of whole GPUs, by PCI address. Every method is thread-safe."""

    def __init__(self, wall: Callable[[], float] = time.time) -> None:
        self._wall = wall
        self._lock = threading.Lock()
        self._address_of: dict[str, str] = {}
        self._uuid_at: dict[str, str] = {}
        self._xids: dict[str, dict[int, _Xid]] = {}
        self._health: dict[str, dict[str, int]] = {}
        self._origins_of_all: set[str] = set()

    def register(self, uuid: str, pci_bus_id: str) -> None:
        """Note that the GPU is at this address: XIDs seen there before are its own.

        A GPU that replaces another one at its address starts again.
        """
        address = normalised_address(pci_bus_id)
        with self._lock:
            before, moved_from = self._uuid_at.get(address), self._address_of.get(uuid)
            if before is not None and before != uuid:
                self._forget(before, address)
            if moved_from is not None and moved_from != address:
                self._uuid_at.pop(moved_from, None)
                self._xids[address] = self._xids.pop(moved_from, {})
            self._uuid_at[address] = uuid
            self._address_of[uuid] = address
            if self._origins_of_all:
                self._count_from_start(address)

    def watched(
        self, origin: str, uuid: str | None = None, xids: bool = True, health: Iterable[str] = ()
    ) -> None:
        """Start an origin's counters at 0, for one GPU or for all.

        So ``increase()`` sees the first occurrence. Only XIDs that mean a hardware fault start at
        0.
        """
        with self._lock:
            if uuid is None:
                self._origins_of_all.add(origin)
                addresses = list(self._uuid_at)
            else:
                addresses = [self._address_of[uuid]] if uuid in self._address_of else []
                counts = self._health.setdefault(uuid, {})
                counts.update({event: 0 for event in health if event not in counts})
            for address in addresses if xids else ():
                self._count_from_start(address)

    def observe(self, pci_bus_id: str, xid: int, origin: str) -> bool:
        """Count an XID.

        Return False for the same event of the other origin, and for one beyond the limit.
        """
        address, now = normalised_address(pci_bus_id), self._wall()
        with self._lock:
            entry = self._entry(address, xid)
            if entry is None or _matched(entry.unmatched, now, origin):
                return False
            entry.unmatched = [*entry.unmatched[1 - MAX_UNMATCHED :], (now, origin)]
            entry.total += 1
            entry.last_time = now
            silent = entry.logged_at is not None and 0 <= now - entry.logged_at < LOG_INTERVAL_S
            if not silent:
                entry.logged_at = now
            uuid = self._uuid_at.get(address, "not known yet")
        if not silent:
            known = explain(xid)
            logger.warning("device %s (%s): XID %d, %s", uuid, address, xid, known.name)
        return True

    def recall(self, pci_bus_id: str, xid: int, time: float) -> None:
        """Note when (wall clock) an XID was written before the origin worked; it is not counted."""
        with self._lock:
            entry = self._entry(normalised_address(pci_bus_id), xid)
            if entry is not None and not entry.total:
                entry.last_time = max(time, entry.last_time or time)

    def forget_recalled(self) -> None:
        """Forget the times of what was recalled: the driver was loaded since."""
        with self._lock:
            for xids in self._xids.values():
                for entry in xids.values():
                    entry.last_time = entry.last_time if entry.total else None

    def observe_health(self, uuid: str, event: str) -> None:
        """Count what the driver reported besides XIDs; ``event`` is from a closed set."""
        with self._lock:
            counts = self._health.setdefault(uuid, {})
            counts[event] = counts.get(event, 0) + 1

    def values(self, uuid: str) -> dict[SeriesKey, float]:
        """Return the series of a GPU."""
        values: dict[SeriesKey, float] = {}
        with self._lock:
            for xid, entry in self._xids.get(self._address_of.get(uuid, ""), {}).items():
                values["device_xid_errors_total", (str(xid),)] = entry.total
                if entry.last_time is not None:
                    values["device_xid_last_timestamp_seconds", (str(xid),)] = entry.last_time
            for event, total in self._health.get(uuid, {}).items():
                values["device_health_events_total", (event,)] = total
        return values

    def _entry(self, address: str, xid: int) -> _Xid | None:
        """Return the entry, or None if a limit is reached."""
        xids = self._xids.get(address)
        if xids is None:
            if len(self._xids) >= MAX_ADDRESSES:
                return None
            xids = self._xids[address] = {}
        if xid not in xids and len(xids) >= MAX_XIDS:
            return None
        return xids.setdefault(xid, _Xid())

    def _count_from_start(self, address: str) -> None:
        for xid in COUNTED_FROM_START:
            self._entry(address, xid)

    def _forget(self, uuid: str, address: str) -> None:
        self._address_of.pop(uuid, None)
        self._health.pop(uuid, None)
        self._xids.pop(address, None)


def _matched(unmatched: list[tuple[float, str]], now: float, origin: str) -> bool:
    """Return whether another origin has reported this event already, and use that report up."""
    while unmatched and abs(now - unmatched[0][0]) > SAME_EVENT_S:
        unmatched.pop(0)
    for report in unmatched:
        if report[1] != origin:
            unmatched.remove(report)
            return True
    return False
