"""Writes files as a whole and never through links, and keeps values over a restart."""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Generic, TypeVar

import msgspec

logger = logging.getLogger(__name__)

MODE = 0o600
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def write(path: Path, data: bytes, durable: bool = True) -> None:
    """Replace the content of the file at ``path``. Raises OSError, and the old content stays.

    ``durable``: the content survives a power cut.
    """
    with replacing(path, durable) as file:
        file.write(data)


@contextlib.contextmanager
def replacing(path: Path, durable: bool = True) -> Iterator[BinaryIO]:
    """Yield a new file that takes the name ``path`` after the block. Raises OSError."""
    folder_fd = os.open(path.parent, _FOLDER)
    part = f"{path.name}.part"
    try:
        # A file of a killed daemon or a link of another user is removed, not followed.
        with contextlib.suppress(FileNotFoundError):
            os.unlink(part, dir_fd=folder_fd)
        fd = os.open(part, _NEW, MODE, dir_fd=folder_fd)
        try:
            with os.fdopen(fd, "wb") as file:
                yield file
                file.flush()
                if durable:
                    os.fsync(fd)
            os.rename(part, path.name, src_dir_fd=folder_fd, dst_dir_fd=folder_fd)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(part, dir_fd=folder_fd)
            raise
        if durable:
            os.fsync(folder_fd)
    finally:
        os.close(folder_fd)


def make_folders(base: Path, path: Path) -> None:
    """Make the folder ``path`` below ``base``, which exists. Raises OSError."""
    for name in path.relative_to(base).parts:
        above, base = base, base / name
        with contextlib.suppress(FileExistsError):
            base.mkdir(0o700)
            _sync(above)


def _sync(folder: Path) -> None:
    folder_fd = os.open(folder, _FOLDER)
    try:
        os.fsync(folder_fd)
    finally:
        os.close(folder_fd)


def touch(path: Path) -> None:
    """Make the file if it is missing, for libraries that open it by name.

    Raises OSError if another kind of file has the name.
    """
    try:
        os.close(os.open(path, _NEW, MODE))
    except FileExistsError:
        if path.is_symlink() or not path.is_file():
            raise


# Enough for 1,024 rings and the locks of 256 pods' folders.
ENOUGH = 16_384


def allow_enough() -> None:
    """Raise the limit of open files, which is commonly 1,024, the possible number of rings."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = ENOUGH if hard == resource.RLIM_INFINITY else min(hard, ENOUGH)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


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
        write(self.path, content, self._is_durable)

    def _unpack(self, content: bytes) -> bytes:
        unpacker = zlib.decompressobj()
        unpacked = unpacker.decompress(content, self._max_bytes)
        if not unpacker.eof:
            raise ValueError("it is cut short or too large")
        return unpacked
