"""Reads the kernel log, for the XIDs that the driver writes there and may never send as events.

A GPU that falls off the bus (XID 79) often loses its event. Reading /dev/kmsg needs CAP_SYSLOG on
most systems, so this source is optional: without it, one line is logged. Records from before the
start are not counted. For XIDs after which a GPU needs service, their time is kept, unless the
driver was loaded since.

SXIDs, the errors of NVSwitches, are ignored: they belong to no GPU, and affected GPUs report their
own XIDs.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

from warpwatch_devices.source import Sink
from warpwatch_devices.xid_ledger import XidLedger
from warpwatch_runtime.supervisor import LoopRunner
from warpwatch_telemetry.samples import SourceHealth
from warpwatch_telemetry.xids import explain

logger = logging.getLogger(__name__)

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


def read_all(path: Path = PATH) -> list[str]:
    """Return all records that the log holds now. Raises OSError if it may not be read."""
    log = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    chunks = []
    try:
        for _ in range(_MAX_READS):
            # Records were overwritten before they were read.
            with contextlib.suppress(BrokenPipeError):
                chunks.append(os.read(log, READ_BYTES))
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
        self._said = False
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
        """Take a record from before the start, by its time since boot."""
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
        if not self._said:
            self._said = True
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
