"""How the daemon writes a file: all of it or nothing, and never through what another put there."""

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

MODE = 0o600
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def write(path: Path, data: bytes, durable: bool = True) -> None:
    """``data`` in the file at ``path``; what it held before stays when that fails, by an OSError.

    ``durable``: it also survives that the machine loses its power.
    """
    with replacing(path, durable) as file:
        file.write(data)


@contextlib.contextmanager
def replacing(path: Path, durable: bool = True) -> Iterator[BinaryIO]:
    """A new file that takes the name ``path`` when the block has ended well. Raises OSError."""
    folder_fd = os.open(path.parent, _FOLDER)
    part = f"{path.name}.part"
    try:
        # Of a daemon that was killed, or a link: gone it is neither followed nor in the way.
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
    """The folder ``path`` below ``base``, which is there. Raises OSError."""
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
    """Make the file where there is none, for who can open it by its name only.

    Raises OSError where something else than a regular file has the name.
    """
    try:
        os.close(os.open(path, _NEW, MODE))
    except FileExistsError:
        if path.is_symlink() or not path.is_file():
            raise


# 1,024 rings, the locks of 256 pods' folders and what else there is need no more.
ENOUGH = 16_384


def allow_enough() -> None:
    """Shells and containers commonly allow 1,024 at first, as many as there may be rings."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = ENOUGH if hard == resource.RLIM_INFINITY else min(hard, ENOUGH)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


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
        write(self.path, content, self._is_durable)

    def _unpack(self, content: bytes) -> bytes:
        unpacker = zlib.decompressobj()
        unpacked = unpacker.decompress(content, self._max_bytes)
        if not unpacker.eof:
            raise ValueError("it is cut short or too large")
        return unpacked
