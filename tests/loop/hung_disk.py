"""Disks in trouble: one that does not answer while the test wants it, and one that is small."""

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.loop.preloaded import compiled


class HungDisk:
    """A disk that hangs; ``environment`` is for the process that must see it hang.

    Skips the test where there is no compiler.
    """

    def __init__(self, folder: Path, disk: Path) -> None:
        self._hangs = folder / "hangs"
        self.environment = {
            "LD_PRELOAD": str(compiled(Path(__file__).with_suffix(".c"), folder)),
            "HUNG_DISK": str(disk), "HUNG_DISK_WHILE": str(self._hangs),
        }  # fmt: skip

    @contextlib.contextmanager
    def hanging(self) -> Iterator[None]:
        self._hangs.touch()
        try:
            yield
        finally:
            self._hangs.unlink()

    def waiting_calls(self) -> set[str]:
        """The names of the calls that wait for it, or have since it first hung."""
        return {path.suffix[1:] for path in self._hangs.parent.glob(f"{self._hangs.name}.*")}


@contextlib.contextmanager
def small_disk(path: Path, size: str) -> Iterator[Path]:
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size},mode=755", "tmpfs", str(path)]
    if os.getuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("a small tmpfs cannot be mounted here")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)
