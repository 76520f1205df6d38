"""Reads the state of a rank's process from the kernel: its memory, silence and kills.

These are small files of /proc and of the control groups. Values are unknown if a file is missing or
may not be read, as in another PID namespace.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from warpwatch.protocol import Identity
from warpwatch_devices.memory_groups import (
    CGROUP,
    PROC,
    field,
    group_headroom,
    host_headroom,
    memory_groups,
    oom_kills,
    read_text,
)
from warpwatch_devices.process_tree import Process, descendants, read_process

# The interval of readings: a hang is reported within 30 s of the last sign of life.
INTERVAL_S = 2.0

# Uninterruptible: in a system call that waits for a disk or a file server.
_DISK_WAIT = "D"


def reading(
    process: Process, family: Mapping[int, Process], proc: Path = PROC, cgroup: Path = CGROUP
) -> dict[str, Any]:
    """Return the detail of an event ``process``. ``family``: with its descendants, by PID.

    cpu_s, io_bytes: processor time, and bytes read and written, of the family since its start.
    disk_wait: a process of the family waits for a disk or a file server now.
    anonymous_bytes: memory of the process itself without a file.
    available_bytes, limit_bytes: of its tightest control group, else of the host.
    """
    members = [process, *descendants(process.pid, family)]
    groups = memory_groups(process.pid, proc, cgroup)
    rooms = [
        room for room in (host_headroom(proc), *map(group_headroom, groups)) if room is not None
    ]
    room = min(rooms, default=None)
    known = {
        "cpu_s": round(sum(member.cpu_s + member.waited_s for member in members), 2),
        "io_bytes": _io_bytes((member.pid for member in members), proc),
        "disk_wait": any(member.state == _DISK_WAIT for member in members),
        "anonymous_bytes": _anonymous_bytes(process.pid, proc),
        "available_bytes": None if room is None else room.available,
        "limit_bytes": None if room is None else room.limit,
    }
    return {name: value for name, value in known.items() if value is not None}


class OomKills:
    """The kernel's kills in the control groups of a process, from its own group upwards."""

    def __init__(self) -> None:
        self._counts: dict[Path, int] = {}

    def note(self, groups: Iterable[Path]) -> None:
        """Note the counts while the process lives."""
        self._counts = {group: kills for group in groups if (kills := oom_kills(group)) is not None}

    def risen(self) -> bool:
        """Return whether the innermost remaining group counts more than when it was noted."""
        for group, before in self._counts.items():
            now = oom_kills(group)
            if now is not None:
                return now > before
        return False


def _io_bytes(pids: Iterable[int], proc: Path) -> int | None:
    """Return bytes read and written, or None if one process may not be read."""
    total = 0
    for pid in pids:
        text = read_text(proc / str(pid) / "io")
        read, written = field(text, "rchar:"), field(text, "wchar:")
        if read is None or written is None:
            return None
        total += read + written
    return total


def _anonymous_bytes(pid: int, proc: Path) -> int | None:
    kibibytes = field(read_text(proc / str(pid) / "status"), "RssAnon:")
    return None if kibibytes is None else 1024 * kibibytes


def boot_id() -> bytes:
    """Return the kernel's boot id as 16 bytes; zeros if it cannot be read."""
    try:
        text = (PROC / "sys/kernel/random/boot_id").read_text()
        return bytes.fromhex(text.strip().replace("-", ""))
    except (OSError, ValueError):
        return bytes(16)


STOPPED = "stopped"
HOLDS_GIL = "holds the GIL"
UNKNOWN = "unknown"

# The interval at which a silent process is checked.
LOOK_S = 1.0

_PROC = Path("/proc")
_CGROUP = Path("/sys/fs/cgroup")


class Silence:
    """The silence of a living process and its reason. Times are of the monotonic clock."""

    def __init__(self, at: float) -> None:
        self.reason: str | None = None
        self._sign_at = at
        self._looked_at = at

    def sign(self, at: float) -> None:
        """Note a sign of life."""
        self._sign_at = at

    def lasts_s(self, at: float) -> float:
        return at - self._sign_at

    def look(self, identity: Identity, at: float, holder_pid: int | None, owner_uid: int) -> None:
        """Update the reason, which may change."""
        if self.reason is None or at - self._looked_at >= LOOK_S:
            self.reason = silent_reason(identity, holder_pid, owner_uid)
            self._looked_at = at

    def over(self) -> bool:
        """End the silence, and return whether there was one."""
        was, self.reason = self.reason, None
        return was is not None


def silent_reason(
    identity: Identity,
    holder_pid: int | None,
    owner_uid: int,
    proc: Path = _PROC,
    cgroup: Path = _CGROUP,
) -> str:
    """Return STOPPED (a signal, a debugger or a frozen control group), HOLDS_GIL or UNKNOWN.

    The identity is the ring's claim and may name any process. The reason is UNKNOWN unless the
    process holds the ring's lock (``holder_pid``) and belongs to the ring's owner. If a process
    runs but the thread of its heartbeat does not, another thread holds the GIL.
    """
    folder = proc / str(identity.pid)
    try:
        is_owners = holder_pid == identity.pid and folder.stat().st_uid == owner_uid
    except OSError:
        return UNKNOWN
    process = read_process(identity.pid, proc) if is_owners else None
    if process is None or process.start_ticks != identity.process_start:
        return UNKNOWN
    stopped = process.state in ("T", "t") or _is_frozen(folder, cgroup)
    return STOPPED if stopped else HOLDS_GIL


def _is_frozen(folder: Path, cgroup: Path) -> bool:
    """Return whether its control group is frozen, as by ``docker pause``."""
    try:
        lines = (folder / "cgroup").read_text().splitlines()
        path = next((line[3:] for line in lines if line.startswith("0::")), None)
        if path is None:
            return False
        return "frozen 1" in (cgroup / path.lstrip("/") / "cgroup.events").read_text()
    except (OSError, ValueError):
        return False
