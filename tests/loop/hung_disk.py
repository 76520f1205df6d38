"""A disk that does not answer for as long as the test says, to one process that is started so."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_suffix(".c")


class HungDisk:
    """``environment``: of the process to which ``disk`` does not answer while it ``hangs``."""

    def __init__(self, disk: Path, library: Path, hangs: Path) -> None:
        self.environment = {
            "LD_PRELOAD": str(library),
            "HUNG_DISK": str(disk),
            "HUNG_DISK_WHILE": str(hangs),
        }
        self._hangs = hangs

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


def build(folder: Path, disk: Path) -> HungDisk:
    """Skips the test where there is no compiler."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    library = folder / "hung_disk.so"
    flags = ["-std=gnu11", "-O2", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror"]
    command = [compiler, *flags, os.fspath(SOURCE), "-o", str(library), "-ldl"]
    subprocess.run(command, check=True, timeout=120)
    return HungDisk(disk, library, folder / "hangs")
