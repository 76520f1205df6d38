"""Keeps one value in one file, so that it survives a restart."""

from __future__ import annotations

import logging
import zlib
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from warpwatch_runtime import files

logger = logging.getLogger(__name__)

T = TypeVar("T")
_FAST = 1


class StateFile(Generic[T]):
    """A value of ``kind`` in a file that is replaced as a whole; an unusable file is logged.

    is_packed: compressed MessagePack, else JSON. max_bytes: of the value, never read or written if
    larger. is_durable: a write survives a power cut.
    """

    def __init__(
        self,
        path: Path,
        kind: Any,
        max_bytes: int,
        *,
        is_packed: bool = False,
        is_durable: bool = False,
    ) -> None:
        self.path = path
        self._kind = kind
        self._max_bytes = max_bytes
        self._is_packed = is_packed
        self._is_durable = is_durable

    def read(self) -> T | None:
        """Return the value, or None if there is none that can be used."""
        try:
            with self.path.open("rb") as file:
                content = file.read(self._max_bytes + 1)
            if len(content) > self._max_bytes:
                raise ValueError(f"it has more than {self._max_bytes} bytes")
            value: T
            if self._is_packed:
                value = msgspec.msgpack.decode(self._unpack(content), type=self._kind)
            else:
                value = msgspec.json.decode(content, type=self._kind)
            return value
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, RecursionError, zlib.error) as error:
            logger.warning("cannot use %s: %s", self.path, error)
            return None

    def encode(self, value: T) -> bytes:
        """Return the content for ``write``, so that another thread may write it."""
        return msgspec.msgpack.encode(value) if self._is_packed else msgspec.json.encode(value)

    def write(self, content: bytes) -> None:
        """Replace the file. Raises OSError if that fails or the content is too large."""
        if len(content) > self._max_bytes:
            raise OSError(f"{len(content)} bytes are more than {self._max_bytes}")
        if self._is_packed:
            content = zlib.compress(content, _FAST)
        files.write(self.path, content, self._is_durable)

    def _unpack(self, content: bytes) -> bytes:
        unpacker = zlib.decompressobj()
        unpacked = unpacker.decompress(content, self._max_bytes)
        if not unpacker.eof:
            raise ValueError("it is cut short or too large")
        return unpacked
