"""Reads from the kernel what a rank's process uses, why it is silent, and OOM kills.

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
from warpwatch_devices.processes import Process, descendants, read_process

# The hang detector needs 20 s of idle readings, and must report a hang within 30 s.
INTERVAL_S = 2.0

# Uninterruptible: in a system call that waits for a disk or a file server.
_DISK_WAIT = "D"


def reading(
    process: Process, family: Mapping[int, Process], proc: Path = PROC, cgroup: Path = CGROUP
) -> dict[str, Any]:
    """Return the detail of a RankEvent ``process``.

    family: all processes by PID, at least the descendants of ``process``.

    cpu_s, io_bytes: processor time, and bytes read and written, of process and descendants.
    disk_wait: whether one of them waits for a disk or a file server now.
    anonymous_bytes: the process's own memory that no file backs.
    available_bytes, limit_bytes: the memory left, and the limit, in the tightest control group (or
    on the host).
    """
    members = [process, *descendants(process.pid, family)]
    groups = memory_groups(process.pid, proc, cgroup)
    memories = (host_headroom(proc), *map(group_headroom, groups))
    tightest = min((memory for memory in memories if memory is not None), default=None)
    known = {
        "cpu_s": round(sum(member.cpu_s + member.waited_s for member in members), 2),
        "io_bytes": _io_bytes((member.pid for member in members), proc),
        "disk_wait": any(member.state == _DISK_WAIT for member in members),
        "anonymous_bytes": _anonymous_bytes(process.pid, proc),
        "available_bytes": None if tightest is None else tightest.available,
        "limit_bytes": None if tightest is None else tightest.limit,
    }
    return {name: value for name, value in known.items() if value is not None}


class OomKills:
    """The kernel's counts of out-of-memory kills in the control groups of a process."""

    def __init__(self) -> None:
        self._counts: dict[Path, int] = {}

    def update(self, groups: Iterable[Path]) -> None:
        """Read the counts while the process lives. ``groups``: from its own group upwards."""
        self._counts = {group: kills for group in groups if (kills := oom_kills(group)) is not None}

    def have_risen(self) -> bool:
        """Return whether the count of the innermost group that is left rose since ``update``."""
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

# The interval at which the reason of a silence is read again.
REASON_S = 1.0


class Silence:
    """The time since a process's last heartbeat, and why it has none. Times are monotonic.

    ``reason`` is None while the process is not reported as silent.
    """

    def __init__(self, at: float) -> None:
        self.reason: str | None = None
        self._heartbeat_at = at
        self._reason_at = at

    def heartbeat(self, at: float) -> None:
        self._heartbeat_at = at

    def duration_s(self, at: float) -> float:
        return at - self._heartbeat_at

    def find_reason(
        self, identity: Identity, at: float, holder_pid: int | None, owner_uid: int
    ) -> None:
        """Read the reason from the kernel, at most every REASON_S."""
        if self.reason is None or at - self._reason_at >= REASON_S:
            self.reason = silent_reason(identity, holder_pid, owner_uid)
            self._reason_at = at

    def end(self) -> bool:
        """Clear the reason. Return whether there was one."""
        was, self.reason = self.reason, None
        return was is not None


def silent_reason(
    identity: Identity,
    holder_pid: int | None,
    owner_uid: int,
    proc: Path = PROC,
    cgroup: Path = CGROUP,
) -> str:
    """Return STOPPED (a signal, a debugger or a frozen control group), HOLDS_GIL or UNKNOWN.

    The identity is the ring's claim and may name any process. The reason is UNKNOWN unless the
    process holds the ring's lock (``holder_pid``) and belongs to the ring's owner. If it runs but
    sends no heartbeat, one of its threads holds the GIL.
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
    """Return whether the process's control group is frozen, as by ``docker pause``."""
    try:
        lines = (folder / "cgroup").read_text().splitlines()
        path = next((line[3:] for line in lines if line.startswith("0::")), None)
        if path is None:
            return False
        return "frozen 1" in (cgroup / path.lstrip("/") / "cgroup.events").read_text()
    except (OSError, ValueError):
        return False
