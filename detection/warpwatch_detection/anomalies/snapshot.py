"""What the engine and its detectors remember, in a file, so that a restart is no new beginning.

Every part stands by itself: with the digest of the form of its state, of the detector's
configuration and of the version that wrote it. A part that does not fit any more is left out, and
only its detector learns anew.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import logging
import typing
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

import msgspec

from warpwatch_telemetry.sections import Section

logger = logging.getLogger(__name__)

FILE = "detectors.state"
# 64 ranks at 200 kB are 13 MB; what is larger is not written, and not read back.
MAX_BYTES = 64 * 2**20
# The part that comes first.
ENGINE = "engine"


class Stateful(Protocol):
    """Keeps all it remembers in ``state``, a dataclass of plain values."""

    state: Any


@dataclasses.dataclass(frozen=True, slots=True)
class SnapshotPart:
    """Who remembers, and the configuration by which; None where none bears on its memory."""

    owner: Stateful
    config: Section | None = None
    versioned: bool = True


class SavedState(msgspec.Struct, frozen=True):
    digest: str
    state: msgspec.Raw


class Snapshot(msgspec.Struct, frozen=True):
    parts: dict[str, SavedState]


def take(parts: dict[str, SnapshotPart], version: str = "") -> bytes:
    """The snapshot of all parts by a program of ``version``; what cannot be saved is left out."""
    saved = {}
    for name, part in parts.items():
        try:
            state = msgspec.Raw(msgspec.msgpack.encode(part.owner.state))
            saved[name] = SavedState(digest(part, version), state)
        except Exception as error:
            _complain(name, str(error))
    return msgspec.msgpack.encode(Snapshot(saved))


@functools.cache
def _complain(name: str, why: str) -> None:
    """Once for each reason."""
    logger.error("the memory of %s cannot be saved: %s", name, why)


def give_back(snapshot: Snapshot, parts: dict[str, SnapshotPart], version: str = "") -> set[str]:
    """Set the state of every part that fits; the names of those that begin anew.

    Without the engine's, which knows what has been read already, the others mean nothing.
    """
    anew: set[str] = set()
    for name, part in parts.items():
        if ENGINE in anew:
            anew.add(name)
            continue
        saved = snapshot.parts.get(name)
        try:
            if saved is None or saved.digest != digest(part, version):
                anew.add(name)
                continue
            form_of = type(part.owner.state)
            part.owner.state = msgspec.msgpack.decode(saved.state, type=form_of)
        except (msgspec.DecodeError, AttributeError, NameError, TypeError) as error:
            logger.warning("the memory of %s cannot be used: %s", name, error)
            anew.add(name)
    return anew


def digest(part: SnapshotPart, version: str = "") -> str:
    """Changes with whatever makes a saved state meaningless."""
    config = b"" if part.config is None else part.config.model_dump_json().encode()
    kind: type = type(part.owner.state)
    text = f"{version if part.versioned else ''}\n{form(kind)}\n".encode() + config
    return hashlib.sha256(text).hexdigest()[:16]


@functools.cache
def form(of: type) -> str:
    """The fields of a dataclass (or Struct) and of all that it is made of, with their types."""
    told: dict[str, str] = {}
    waiting = [of]
    while waiting:
        one = waiting.pop()
        if one.__qualname__ in told:
            continue
        hints = typing.get_type_hints(one)
        told[one.__qualname__] = ", ".join(f"{name}: {hint}" for name, hint in hints.items())
        for hint in hints.values():
            waiting.extend(inner for inner in _named(hint) if _has_fields(inner))
    return "; ".join(f"{name}({fields})" for name, fields in sorted(told.items()))


def _has_fields(of: type) -> bool:
    return dataclasses.is_dataclass(of) or issubclass(of, msgspec.Struct)


def _named(hint: Any) -> Iterable[type]:
    """The classes that a type hint speaks of."""
    if isinstance(hint, type):
        yield hint
    for inner in typing.get_args(hint):
        yield from _named(inner)


def save(path: Path, body: bytes) -> int:
    """Write the file in one go; its size. Raises OSError when there is no space."""
    packed = zlib.compress(body, 1)
    fresh = path.with_suffix(".part")
    fresh.write_bytes(packed)
    fresh.replace(path)
    return len(packed)


def load(path: Path) -> Snapshot | None:
    """None where there is none; one that cannot be read is told in one line."""
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
        logger.warning("the detectors begin anew: %s cannot be used: %s", path, error)
        return None
