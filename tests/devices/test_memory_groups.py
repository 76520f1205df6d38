"""Which control groups a process is in, and what these and the host leave of memory."""

from __future__ import annotations

from pathlib import Path

from warpwatch_devices.memory_groups import group_room, host_room, memory_groups, oom_kills

MIB = 1 << 20


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_a_limit_of_either_version_counts_without_the_file_cache(tmp_path: Path) -> None:
    assert group_room(tmp_path) is None
    write(tmp_path / "memory.max", "max\n")
    write(tmp_path / "memory.current", f"{400 * MIB}\n")
    assert group_room(tmp_path) is None
    write(tmp_path / "memory.max", f"{512 * MIB}\n")
    write(tmp_path / "memory.stat", f"anon 1\ninactive_file {300 * MIB}\n")
    assert group_room(tmp_path) == (412 * MIB, 512 * MIB)
    write(tmp_path / "1/memory.limit_in_bytes", f"{96 * MIB}\n")
    write(tmp_path / "1/memory.usage_in_bytes", f"{60 * MIB}\n")
    assert group_room(tmp_path / "1") == (36 * MIB, 96 * MIB)


def test_memory_groups_are_those_of_either_version_and_never_outside(tmp_path: Path) -> None:
    write(tmp_path / "7/cgroup", "9:cpu:/x\n4:memory:/slurm/job_1\n0::/\n")
    top = tmp_path / "cgroup"
    assert list(memory_groups(7, tmp_path, top)) == [
        top / "memory/slurm/job_1", top / "memory/slurm", top / "memory", top,
    ]  # fmt: skip
    write(tmp_path / "8/cgroup", "0::/../../other\n")
    assert list(memory_groups(8, tmp_path, top)) == []
    write(tmp_path / "self/cgroup", "0::/system.slice/warpwatch.service\n")
    assert list(memory_groups("self", tmp_path, top)) == [
        top / "system.slice/warpwatch.service", top / "system.slice", top,
    ]  # fmt: skip


def test_the_host_says_what_is_available(tmp_path: Path) -> None:
    write(tmp_path / "meminfo", "MemTotal: 4096 kB\nMemAvailable:   2048 kB\n")
    assert host_room(tmp_path) == (2 * MIB, 4 * MIB)
    assert host_room(tmp_path / "none") is None


def test_the_first_version_counts_kills_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 6\n")
    assert oom_kills(tmp_path) == 6
    assert oom_kills(tmp_path / "none") is None
