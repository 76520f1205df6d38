"""How much memory is left: in the control groups that this process is in, and on the host."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

# What must stay for the daemon when a child takes all that it may.
RESERVE_BYTES = 32 << 20
UNLIMITED = 1 << 62

# Of control groups version 2, then 1: limit, usage, and what file cache is called in memory.stat.
_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def cgroups(root: Path = Path("/")) -> Iterator[Path]:
    """The memory group of this process and those above it; in a container the mount's root."""
    base = root / "sys/fs/cgroup"
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        top = base / "memory" if controllers else base
        group = top / path.lstrip("/")
        # Without a namespace of its own a container sees the host's path and not that folder.
        yield top
        yield from (folder for folder in (group, *group.parents) if top in folder.parents)


def room(folder: Path) -> int:
    """Bytes that the group leaves beside the reserve; UNLIMITED where it sets no limit."""
    for limit_file, usage_file, cache in _FILES:
        limit, usage = _read(folder / limit_file), _read(folder / usage_file)
        if limit.strip().isdigit() and usage.strip().isdigit():
            # File cache counts as used, but goes when the memory is needed.
            used = int(usage) - field(_read(folder / "memory.stat"), cache)
            return int(limit) - used - RESERVE_BYTES
    return UNLIMITED


def host_available(root: Path = Path("/")) -> int:
    return 1024 * field(_read(root / "proc/meminfo"), "MemAvailable:") or UNLIMITED


def field(text: str, name: str) -> int:
    """The number behind a name, as in memory.stat and meminfo; 0 when it is not there."""
    for line in text.splitlines():
        words = line.split()
        if len(words) >= 2 and words[0] == name:
            return int(words[1])
    return 0


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
