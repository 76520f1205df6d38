"""Writes capture files into the inbox, hidden until they are complete."""

from __future__ import annotations

import gzip
import os
from collections.abc import Callable

# The expected size of a capture, until a capture of this process was larger.
ESTIMATE_BYTES = 100 << 20
MIN_FREE_SHARE = 0.2
_CHUNK_BYTES = 1 << 20
# Level 1 is four times as fast as the default and 10 to 20 % larger on traces.
_GZIP_LEVEL = 1
# Every event of a trace has a phase.
_EVENT = b'"ph"'


def problem(path: str, estimate_bytes: int = ESTIMATE_BYTES) -> str | None:
    """Return no_inbox or no_space if nothing may be written there, else None."""
    if not (os.path.isdir(path) and os.access(path, os.W_OK | os.X_OK)):
        return "no_inbox"
    disk = os.statvfs(path)
    free = disk.f_bavail * disk.f_frsize
    left = free - estimate_bytes
    if free < 2 * estimate_bytes or left < MIN_FREE_SHARE * disk.f_blocks * disk.f_frsize:
        return "no_space"
    return None


def create(path: str) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.open(path, flags, 0o600)


def token() -> str:
    """Return a random part of a name, which other users of the inbox cannot take first."""
    return os.urandom(8).hex()


def hand_over(base: str, suffix: str, write: Callable[[int], None]) -> str:
    """Make ``<base>.<token><suffix>`` appear complete and readable; return the token.

    ``write`` gets the descriptor. Raises OSError.
    """
    hidden, chosen = f"{base}.{token()}.tmp", token()
    fd = create(hidden)
    try:
        write(fd)
        os.fchmod(fd, 0o644)
        os.rename(hidden, f"{base}.{chosen}{suffix}")
        return chosen
    except BaseException:
        os.unlink(hidden)
        raise
    finally:
        os.close(fd)


def write(fd: int, data: bytes) -> None:
    """Write all of ``data``. Raises OSError."""
    with os.fdopen(os.dup(fd), "wb") as file:
        file.write(data)


def write_gzip(source: str, fd: int, between: Callable[[], None]) -> int:
    """Compress the trace ``source`` into ``fd`` and count its events.

    ``between`` is called after every chunk.
    """
    events, tail = 0, b""
    with (
        open(source, "rb") as plain,
        os.fdopen(os.dup(fd), "wb") as raw,
        gzip.GzipFile("", "wb", _GZIP_LEVEL, raw) as packed,
    ):
        while True:
            chunk = plain.read(_CHUNK_BYTES)
            if not chunk:
                return events
            packed.write(chunk)
            # An event's mark may lie across two chunks.
            events += (tail + chunk).count(_EVENT)
            tail = chunk[1 - len(_EVENT) :]
            between()
