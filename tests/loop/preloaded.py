"""Libraries of the tests' own that a process is started with, compiled when they are needed."""

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest


def compiled(source: Path, folder: Path) -> Path:
    """Skips the test where there is no compiler."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    library = folder / source.with_suffix(".so").name
    flags = ["-std=gnu11", "-O2", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror"]
    command = [compiler, *flags, os.fspath(source), "-o", str(library), "-ldl"]
    subprocess.run(command, check=True, timeout=120)
    return library


class ShiftedClock:
    """A wall clock that processes with this ``environment`` have, and that may be set."""

    def __init__(self, folder: Path) -> None:
        library = compiled(Path(__file__).with_name("shifted_clock.c"), folder)
        self._path = folder / "clock"
        preload = {"LD_PRELOAD": str(library), "SHIFTED_CLOCK": str(self._path)}
        self.environment: dict[str, Any] = preload
        self.set(0)

    def set(self, offset_s: int) -> None:
        """So many seconds before (negative) or after the machine's own clock."""
        with self._path.open("r+b" if self._path.exists() else "wb") as file:
            file.write(offset_s.to_bytes(8, "little", signed=True))
