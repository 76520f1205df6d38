"""What a kubelet and its containers leave on a machine, and how it is taken away."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

KUBELET_FOLDER = Path("/var/lib/kubelet")
# Made by the kubelet and by containerd's shims, wherever they are configured to work.
_FOLDERS = (
    KUBELET_FOLDER,
    Path("/var/log/pods"),
    Path("/var/log/containers"),
    Path("/run/containerd"),
)
# A kubelet sets these as it likes them: the manager of containers in its start.
_SETTINGS = (
    "vm/overcommit_memory",
    "vm/panic_on_oom",
    "kernel/panic",
    "kernel/panic_on_oops",
    "kernel/keys/root_maxkeys",
    "kernel/keys/root_maxbytes",
)
_CONTROL_GROUPS = Path("/sys/fs/cgroup")


@contextmanager
def traces_removed(work: Path) -> Iterator[None]:
    """Afterwards nothing is mounted in ``work`` or the kubelet's folder, and all is as it was."""
    folders = [folder for folder in _FOLDERS if not folder.exists()]
    settings = {Path("/proc/sys", name): _read(Path("/proc/sys", name)) for name in _SETTINGS}
    try:
        yield
    finally:
        _unmount(KUBELET_FOLDER, work)
        _remove_control_groups()
        for path, text in settings.items():
            if _read(path) != text:
                path.write_text(text)
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)


def _read(path: Path) -> str:
    return path.read_text()


def _unmount(*folders: Path) -> None:
    """And all below; the newest first, as mounts may lie on each other."""
    mounted = [Path(line.split()[1]) for line in Path("/proc/mounts").read_text().splitlines()]
    for path in reversed(mounted):
        if any(path.is_relative_to(folder) for folder in folders):
            subprocess.run(["umount", str(path)], check=True)


def _remove_control_groups() -> None:
    for root in _CONTROL_GROUPS.glob("*/kubepods"):
        for folder, _, _ in os.walk(root, topdown=False):
            with suppress(FileNotFoundError):
                os.rmdir(folder)
