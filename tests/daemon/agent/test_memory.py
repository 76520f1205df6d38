"""The room for a diagnosis: the tightest of the groups that the daemon is in."""

from __future__ import annotations

from pathlib import Path

from warpwatch_daemon.captures.memory import RESERVE_BYTES, UNLIMITED, cgroups, host_available, room

MIB = 1 << 20


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_a_limit_of_version_2_counts_without_the_file_cache(tmp_path: Path) -> None:
    write(tmp_path / "memory.max", f"{512 * MIB}\n")
    write(tmp_path / "memory.current", f"{400 * MIB}\n")
    write(tmp_path / "memory.stat", f"anon 1\ninactive_file {300 * MIB}\n")
    assert room(tmp_path) == 412 * MIB - RESERVE_BYTES


def test_a_limit_of_version_1_counts(tmp_path: Path) -> None:
    write(tmp_path / "memory.limit_in_bytes", f"{96 * MIB}\n")
    write(tmp_path / "memory.usage_in_bytes", f"{60 * MIB}\n")
    assert room(tmp_path) == 36 * MIB - RESERVE_BYTES


def test_no_limit_and_no_group_are_unlimited(tmp_path: Path) -> None:
    assert room(tmp_path) == UNLIMITED
    write(tmp_path / "memory.max", "max\n")
    write(tmp_path / "memory.current", "1\n")
    assert room(tmp_path) == UNLIMITED


def test_the_unit_of_a_service_manager_is_found_with_all_groups_above(tmp_path: Path) -> None:
    write(tmp_path / "proc/self/cgroup", "0::/system.slice/warpwatch.service\n")
    base = tmp_path / "sys/fs/cgroup"
    assert list(cgroups(tmp_path)) == [
        base,
        base / "system.slice/warpwatch.service",
        base / "system.slice",
    ]


def test_version_1_looks_at_the_memory_hierarchy_alone(tmp_path: Path) -> None:
    write(tmp_path / "proc/self/cgroup", "5:cpu,cpuacct:/a\n4:memory:/pod/c\n")
    base = tmp_path / "sys/fs/cgroup/memory"
    assert list(cgroups(tmp_path)) == [base, base / "pod/c", base / "pod"]


def test_the_host_says_what_is_available(tmp_path: Path) -> None:
    write(tmp_path / "proc/meminfo", "MemTotal: 9 kB\nMemAvailable:   2048 kB\n")
    assert host_available(tmp_path) == 2 * MIB
    assert host_available(tmp_path / "none") == UNLIMITED
