"""The file with what the detectors remember, over a restart of the daemon."""

from __future__ import annotations

import logging
import zlib
from pathlib import Path

import msgspec

from warpwatch_daemon import files
from warpwatch_detection.anomalies.snapshot import Snapshot

logger = logging.getLogger(__name__)

FILE = "detectors.state"
# 64 ranks at 200 kB are 13 MB; what is larger is not written, and not read back.
MAX_BYTES = 64 * 2**20


def save(path: Path, body: bytes) -> None:
    """Write the file in one go. Raises OSError when there is no space."""
    if len(body) > MAX_BYTES:
        raise OSError(f"{len(body)} bytes are more than {MAX_BYTES}")
    files.write(path, zlib.compress(body, 1))


def load(path: Path) -> Snapshot | None:
    """None where there is none; what cannot be read is logged in one line."""
    try:
        with path.open("rb") as file:
            packed = file.read(MAX_BYTES + 1)
        unpacker = zlib.decompressobj()
        body = unpacker.decompress(packed, MAX_BYTES)
        if not unpacker.eof:
            raise ValueError("it is cut short or too large")
        return msgspec.msgpack.decode(body, type=Snapshot)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, zlib.error, msgspec.DecodeError) as error:
        logger.warning("the detectors start without what they knew: %s: %s", path, error)
        return None
