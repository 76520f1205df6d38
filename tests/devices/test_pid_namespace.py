"""PIDs of the host mean something only in its own namespace."""

from __future__ import annotations

from pathlib import Path

from warpwatch_devices.process_tree import sees_host_processes


def test_another_pid_namespace_is_noticed(tmp_path: Path) -> None:
    namespaces = tmp_path / "self" / "ns"
    namespaces.mkdir(parents=True)
    assert not sees_host_processes(tmp_path)
    (namespaces / "pid").symlink_to("pid:[4026532201]")
    assert not sees_host_processes(tmp_path)
    (namespaces / "pid").unlink()
    (namespaces / "pid").symlink_to("pid:[4026531836]")
    assert sees_host_processes(tmp_path)
