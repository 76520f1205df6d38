"""What the kernel says of a rank's process: whether it moves, its memory, and who ended it.

Everything here is a few small files of /proc and of the control groups. What may not be read, or
is not there (another PID namespace, control groups hidden by a container), is unknown.
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
    group_room,
    host_room,
    memory_groups,
    oom_kills,
    read_text,
)
from warpwatch_devices.process_tree import Process, descendants, read_process

# How often a process is looked at: a hang is reported within 30 s of its last sign of life.
INTERVAL_S = 2.0

# Uninterruptible: in a system call that waits for a disk or a file server.
_DISK_WAIT = "D"


def reading(
    process: Process, family: Mapping[int, Process], proc: Path = PROC, cgroup: Path = CGROUP
) -> dict[str, Any]:
    """The detail of an event ``process``. ``family``: the process and its descendants, by PID.

    cpu_s, io_bytes: processor time and bytes read and written since they began, of the family.
    disk_wait: one of the family waits for a disk or a file server just now.
    anonymous_bytes: memory of the process itself that no file stands behind.
    available_bytes, limit_bytes: what its tightest control group leaves and allows, else the host.
    """
    members = [process, *descendants(process.pid, family)]
    groups = memory_groups(process.pid, proc, cgroup)
    rooms = [room for room in (host_room(proc), *map(group_room, groups)) if room is not None]
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
    """The kernel's kills in the control groups of one process, from its own group upwards."""

    def __init__(self) -> None:
        self._counts: dict[Path, int] = {}

    def note(self, groups: Iterable[Path]) -> None:
        """How they stand while the process lives."""
        self._counts = {group: kills for group in groups if (kills := oom_kills(group)) is not None}

    def risen(self) -> bool:
        """Whether the innermost group that is still there counts more than when it was noted."""
        for group, before in self._counts.items():
            now = oom_kills(group)
            if now is not None:
                return now > before
        return False


def _io_bytes(pids: Iterable[int], proc: Path) -> int | None:
    """None where one of them may not be looked at: what it moves cannot be known."""
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
    """The kernel's boot id as 16 bytes; zeros where it cannot be read."""
    try:
        text = (PROC / "sys/kernel/random/boot_id").read_text()
        return bytes.fromhex(text.strip().replace("-", ""))
    except (OSError, ValueError):
        return bytes(16)


STOPPED = "stopped"
HOLDS_GIL = "holds the GIL"
UNKNOWN = "unknown"

# How often a silent process is looked at.
LOOK_S = 1.0

_PROC = Path("/proc")
_CGROUP = Path("/sys/fs/cgroup")


class Silence:
    """Since when a living process gives no sign, and why. Times are of the monotonic clock."""

    def __init__(self, at: float) -> None:
        self.reason: str | None = None
        self._sign_at = at
        self._looked_at = at

    def sign(self, at: float) -> None:
        """It gave one."""
        self._sign_at = at

    def lasts_s(self, at: float) -> float:
        return at - self._sign_at

    def look(self, identity: Identity, at: float, holder_pid: int | None, owner_uid: int) -> None:
        """Find the reason, now and then again: it may change."""
        if self.reason is None or at - self._looked_at >= LOOK_S:
            self.reason = silent_reason(identity, holder_pid, owner_uid)
            self._looked_at = at

    def over(self) -> bool:
        """It is no longer silent; whether it was."""
        was, self.reason = self.reason, None
        return was is not None


def silent_reason(
    identity: Identity,
    holder_pid: int | None,
    owner_uid: int,
    proc: Path = _PROC,
    cgroup: Path = _CGROUP,
) -> str:
    """One of STOPPED (a signal, a debugger or a frozen control group), HOLDS_GIL and UNKNOWN.

    The identity is the ring's claim: it may name any process. UNKNOWN unless the kernel says
    the same (``holder_pid``: who holds the ring's lock) and the process is the ring's owner's; in
    another PID namespace or on another kernel neither can be known. A process that runs while its
    heartbeat's thread does not is kept by its GIL.
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
    """As ``docker pause`` does it, where control groups of version 2 can be read."""
    try:
        lines = (folder / "cgroup").read_text().splitlines()
        path = next((line[3:] for line in lines if line.startswith("0::")), None)
        if path is None:
            return False
        return "frozen 1" in (cgroup / path.lstrip("/") / "cgroup.events").read_text()
    except (OSError, ValueError):
        return False
