"""A disk that does not answer for as long as the test says, to one process that is started so."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from tests.loop.preloaded import compiled


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
    library = compiled(Path(__file__).with_suffix(".c"), folder)
    return HungDisk(disk, library, folder / "hangs")
