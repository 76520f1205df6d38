"""What the kernel says of a rank's process: whether it moves, its memory, and who ended it.

Everything here is a few small files of /proc and of the control groups. What may not be read, or
is not there (another PID namespace, control groups hidden by a container), is unknown.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from warpwatch_devices.process_tree import Process, descendants

# How often a process is looked at: a hang is reported within 30 s of its last sign of life.
INTERVAL_S = 2.0

_PROC = Path("/proc")
_CGROUP = Path("/sys/fs/cgroup")
# Uninterruptible: in a system call that waits for a disk or a file server.
_DISK_WAIT = "D"
# Of memory control groups of version 2, then 1: limit, usage, what file cache is called in
# memory.stat, and the file that counts the kernel's kills.
_GROUP_FILES = (
    ("memory.max", "memory.current", "inactive_file", "memory.events"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file", "memory.oom_control"),
)


def reading(
    process: Process, family: Mapping[int, Process], proc: Path = _PROC, cgroup: Path = _CGROUP
) -> dict[str, Any]:
    """The detail of an event ``process``. ``family``: the process and its descendants, by PID.

    cpu_s, io_bytes: processor time and bytes read and written since they began, of the family.
    disk_wait: one of the family waits for a disk or a file server just now.
    anonymous_bytes: memory of the process itself that no file stands behind.
    available_bytes, limit_bytes: what its tightest control group leaves and allows, else the host.
    """
    members = [process, *descendants(process.pid, family)]
    room = _room(memory_groups(process.pid, proc, cgroup), proc)
    known = {
        "cpu_s": round(sum(member.cpu_s + member.waited_s for member in members), 2),
        "io_bytes": _io_bytes((member.pid for member in members), proc),
        "disk_wait": any(member.state == _DISK_WAIT for member in members),
        "anonymous_bytes": _anonymous_bytes(process.pid, proc),
        "available_bytes": None if room is None else room[0],
        "limit_bytes": None if room is None else room[1],
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


def memory_groups(pid: int, proc: Path = _PROC, cgroup: Path = _CGROUP) -> Iterator[Path]:
    """Folders of the memory control groups that a process is in, innermost first."""
    for line in _read(proc / str(pid) / "cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        # Outside of the daemon's own control group namespace: no such folder here.
        if (controllers and "memory" not in controllers.split(",")) or ".." in path:
            continue
        top = cgroup / "memory" if controllers else cgroup
        folder = top / path.lstrip("/")
        yield from (group for group in (folder, *folder.parents) if top in (group, *group.parents))


def oom_kills(group: Path) -> int | None:
    for *_, events in _GROUP_FILES:
        kills = _field(_read(group / events), "oom_kill")
        if kills is not None:
            return kills
    return None


def _room(groups: Iterable[Path], proc: Path) -> tuple[int, int] | None:
    """(available, limit) in bytes where the least is left; None where nothing can be read."""
    rooms = [room for group in groups if (room := _group_room(group)) is not None]
    meminfo = _read(proc / "meminfo")
    available, total = _field(meminfo, "MemAvailable:"), _field(meminfo, "MemTotal:")
    if available is not None and total is not None:
        rooms.append((1024 * available, 1024 * total))
    return min(rooms, default=None)


def _group_room(group: Path) -> tuple[int, int] | None:
    for limit_file, usage_file, cache, _ in _GROUP_FILES:
        limit, usage = _read(group / limit_file).strip(), _read(group / usage_file).strip()
        if limit.isdigit() and usage.isdigit():
            # File cache counts as used, but goes when the memory is needed.
            used = int(usage) - (_field(_read(group / "memory.stat"), cache) or 0)
            return max(0, int(limit) - used), int(limit)
    return None


def _io_bytes(pids: Iterable[int], proc: Path) -> int | None:
    """None where one of them may not be looked at: what it moves cannot be known."""
    total = 0
    for pid in pids:
        text = _read(proc / str(pid) / "io")
        read, written = _field(text, "rchar:"), _field(text, "wchar:")
        if read is None or written is None:
            return None
        total += read + written
    return total


def _anonymous_bytes(pid: int, proc: Path) -> int | None:
    kibibytes = _field(_read(proc / str(pid) / "status"), "RssAnon:")
    return None if kibibytes is None else 1024 * kibibytes


def _field(text: str, name: str) -> int | None:
    """The number behind a name, as in memory.stat, meminfo, status and io."""
    for line in text.splitlines():
        words = line.split(None, 2)
        if len(words) >= 2 and words[0] == name and words[1].isdigit():
            return int(words[1])
    return None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
