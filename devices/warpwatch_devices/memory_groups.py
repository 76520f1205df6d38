"""Reads the memory that control groups and the host have left, and the kernel's OOM kills.

A value that is missing or may not be read is None (a container may hide control groups).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

PROC = Path("/proc")
CGROUP = Path("/sys/fs/cgroup")
# For control groups of version 2, then 1: limit, usage, the name of file cache in memory.stat, and
# the file that counts OOM kills.
_FILES = (
    ("memory.max", "memory.current", "inactive_file", "memory.events"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file", "memory.oom_control"),
)


class MemoryHeadroom(NamedTuple):
    """Available bytes and their limit; the tightest of several is the least."""

    available: int
    limit: int


def memory_groups(pid: int | str, proc: Path = PROC, cgroup: Path = CGROUP) -> Iterator[Path]:
    """Yield the folders of a process's memory control groups, innermost first."""
    return control_groups(pid, "memory", proc, cgroup)


def control_groups(
    pid: int | str, controller: str, proc: Path = PROC, cgroup: Path = CGROUP
) -> Iterator[Path]:
    """Yield the folders of a process's control groups of one controller, innermost first."""
    for line in read_text(proc / str(pid) / "cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        # Outside of the daemon's own control group namespace: no such folder here.
        if (controllers and controller not in controllers.split(",")) or ".." in path:
            continue
        top = cgroup / controller if controllers else cgroup
        folder = top / path.lstrip("/")
        yield from (group for group in (folder, *folder.parents) if top in (group, *group.parents))


def group_headroom(group: Path) -> MemoryHeadroom | None:
    """Return the group's headroom, or None if it has no limit."""
    for limit_file, usage_file, cache, _ in _FILES:
        limit, usage = read_text(group / limit_file).strip(), read_text(group / usage_file).strip()
        if limit.isdigit() and usage.isdigit():
            # File cache counts as used, but goes when the memory is needed.
            used = int(usage) - (field(read_text(group / "memory.stat"), cache) or 0)
            return MemoryHeadroom(max(0, int(limit) - used), int(limit))
    return None


def host_headroom(proc: Path = PROC) -> MemoryHeadroom | None:
    meminfo = read_text(proc / "meminfo")
    available, total = field(meminfo, "MemAvailable:"), field(meminfo, "MemTotal:")
    return (
        None
        if available is None or total is None
        else MemoryHeadroom(1024 * available, 1024 * total)
    )


def oom_kills(group: Path) -> int | None:
    for *_, events in _FILES:
        kills = field(read_text(group / events), "oom_kill")
        if kills is not None:
            return kills
    return None


def field(text: str, name: str) -> int | None:
    """Return the number after a name, as in memory.stat, meminfo, and a process's status and io."""
    for line in text.splitlines():
        words = line.split(None, 2)
        if len(words) >= 2 and words[0] == name and words[1].isdigit():
            return int(words[1])
    return None


def read_text(path: Path) -> str:
    """Return the text, or nothing if the file cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
