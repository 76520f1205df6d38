"""Counts every XID once, from the driver's events and the kernel log.

An XID may come as an event of NVML and again as a line of the kernel log. Two reports of the same
GPU and number within a few seconds are one XID if their origins differ, and two if not. The ledger
outlives the sessions of NVML.

The driver writes XIDs to the kernel log that it may never send as events: a GPU that falls off the
bus (XID 79) often loses its event. Reading /dev/kmsg needs CAP_SYSLOG on most systems, so this
source is optional: without it, one line is logged. Records from before the start are not counted.
For XIDs after which a GPU needs service, their time is kept, unless the driver was loaded since.
SXIDs, the errors of NVSwitches, are ignored: they belong to no GPU, and affected GPUs report their
own XIDs.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from warpwatch_devices.source import Sink
from warpwatch_runtime.supervisor import LoopRunner
from warpwatch_telemetry.metric import SeriesKey
from warpwatch_telemetry.samples import SourceHealth
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


ORIGIN = "kernel_log"
PATH = Path("/dev/kmsg")
INTERVAL_S = 1.0
# How long before a log that could not be opened is tried again.
REOPEN_INTERVAL_S = 60.0
MAX_RECORDS_PER_ROUND = 1000
# The kernel refuses (EINVAL) a buffer that the record does not fit in; records end below 8 KiB.
READ_BYTES = 16 * 1024
MAX_RECORD_BYTES = 64 * 1024
# A read of /dev/kmsg returns one record; logs hold fewer.
_MAX_READS = 1 << 18

# "6,339,5140900,-;text": priority and facility, sequence number, µs since boot, flags
# (Documentation/ABI/testing/dev-kmsg).
_HEADER = re.compile(r"(\d+),\d+,(\d+),[^;]*;")
# "NVRM: Xid (PCI:0000:1a:00): 79, …", "… (0000:1a:00): …" of old drivers, "… (PCI:0000:1a:00.0
# GPU-I:05): …" on MIG: what follows the address within the brackets does not matter.
_XID = re.compile(
    r"NVRM: Xid \((?:PCI:)?"
    r"((?:[0-9a-fA-F]{4,8}:)?[0-9a-fA-F]{2,4}:[0-9a-fA-F]{2}(?:\.[0-7])?)"
    r"(?:[\s,][^)]*)?\): ([1-9][0-9]{0,3})(?![0-9])"
)


_DRIVER_LOADED = "NVRM: loading NVIDIA UNIX"


def parse_record(line: str) -> list[tuple[str, int]]:
    """Return PCI address and number of each XID in a record of the kernel log.

    A line that starts with a space continues a record with its dictionary. Programs may write to
    the log too; only the kernel has facility 0.
    """
    return [(match[1], int(match[2])) for match in _XID.finditer(_kernel_text(line))]


def _kernel_text(line: str) -> str:
    header = _HEADER.match(line)
    if line.startswith(" ") or (header is not None and int(header[1]) >> 3 != 0):
        return ""
    return line[header.end() :] if header else line


def time_of(line: str) -> float:
    """Return when a record was written, in seconds since boot; a line without a header: 0."""
    header = _HEADER.match(line)
    return int(header[2]) / 1e6 if header else 0.0


def read_all(path: Path = PATH, read: Callable[[int, int], bytes] = os.read) -> list[str]:
    """Return all records that the log holds now. Raises OSError if it may not be read."""
    log = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    chunks = []
    try:
        for _ in range(_MAX_READS):
            # Records were overwritten before they were read.
            with contextlib.suppress(BrokenPipeError):
                chunks.append(read(log, READ_BYTES))
                if not chunks[-1]:
                    break
    except BlockingIOError:
        pass
    finally:
        os.close(log)
    return b"".join(chunks).decode(errors="replace").splitlines()


class KernelLogSource:
    """Hands XIDs on to the ledger: those written before its start as history. Never blocks."""

    name = "kernel_log"

    def __init__(
        self,
        ledger: XidLedger,
        path: Path = PATH,
        monotonic: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._monotonic, self._wall = monotonic, wall
        self._path = path
        self._ledger = ledger
        self._log: int | None = None
        self._open_at = 0.0
        self._worked = False
        self._logged = False
        self._errors = 0
        self._lines: deque[bytes] = deque()
        self._rest = b""
        # Whether the log has been read to where it ended when it was opened.
        self._caught_up = False

    def start(self, supervisor: LoopRunner, sink: Sink) -> None:
        supervisor.every(self.name, INTERVAL_S, lambda: self._round(sink))

    def close(self) -> None:
        log, self._log = self._log, None
        if log is not None:
            os.close(log)

    def _round(self, sink: Sink) -> None:
        begun = self._monotonic()
        reason = ""
        try:
            if self._log is None and not self._open(begun):
                return
            for line in self._records():
                if self._caught_up:
                    for address, xid in parse_record(line):
                        self._ledger.observe(address, xid, ORIGIN)
                else:
                    self._recall(line)
        except OSError as error:
            reason = self._lost(error)
        if self._worked:
            duration_s = self._monotonic() - begun
            health = SourceHealth(self.name, not reason, reason, duration_s, self._errors)
            sink.publish_health(health)

    def _open(self, now: float) -> bool:
        """Open the log at its oldest record. Raises OSError where it may not be read."""
        if now < self._open_at:
            return False
        self._open_at = now + REOPEN_INTERVAL_S
        self._log = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        self._lines.clear()
        self._rest = b""
        self._caught_up = False
        self._worked = True
        self._ledger.watched(ORIGIN)
        return True

    def _recall(self, line: str) -> None:
        """Note the XIDs of a record from before the start, by its time since boot."""
        if _HEADER.match(line) is None:
            return
        ago_s = max(0.0, self._monotonic() - time_of(line))
        for address, xid in parse_record(line):
            if explain(xid).needs:
                self._ledger.recall(address, xid, self._wall() - ago_s)
        if _DRIVER_LOADED in _kernel_text(line):
            self._ledger.forget_recalled()

    def _lost(self, error: OSError) -> str:
        """Close the log; return in one line why it cannot be read."""
        reason = f"{self._path}: {error.strerror or error}"
        if self._worked:
            self._errors += 1
        if not self._logged:
            self._logged = True
            logger.info(
                "the kernel log is not read (%s): XIDs come from NVML's events alone; reading it "
                "wants CAP_SYSLOG, or kernel.dmesg_restrict=0, and the file in the container",
                reason,
            )
        self.close()
        return reason

    def _records(self) -> Iterator[str]:
        """Yield at most a round's records; the others wait for the next round."""
        for _ in range(MAX_RECORDS_PER_ROUND):
            if not self._lines and not self._fill():
                self._caught_up = True
                return
            if self._lines:
                yield self._lines.popleft().decode("utf-8", "replace")

    def _fill(self) -> bool:
        """Read on; False when nothing is there yet. A read of /dev/kmsg returns one record."""
        log = self._log
        if log is None:
            return False
        try:
            chunk = os.read(log, READ_BYTES)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno != errno.EPIPE:
                raise
            # Records were overwritten before they were read; the next read goes on behind them.
            self._errors += 1
            return True
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        self._lines.extend(lines)
        if len(self._rest) > MAX_RECORD_BYTES:
            self._rest = b""
            self._errors += 1
        return bool(chunk)
