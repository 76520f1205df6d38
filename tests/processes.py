"""Programs that tests start, with what they write in a log."""

import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def logged(command: Sequence[str], log: Path, **options: Any) -> subprocess.Popen[bytes]:
    """Start a program whose output goes to the end of ``log``; ``options`` are those of Popen."""
    with log.open("ab") as output:
        return subprocess.Popen(command, stdout=output, stderr=output, **options)


@contextmanager
def running(command: Sequence[str], log: Path, **options: Any) -> Iterator[None]:
    """Run a program to the end of the block, where it is killed."""
    process = logged(command, log, **options)
    try:
        yield
    finally:
        process.kill()
        process.wait()
