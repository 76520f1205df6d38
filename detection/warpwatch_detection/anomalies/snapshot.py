"""What the engine and its detectors remember, as bytes, so that a restart is no new beginning.

Every part stands by itself. That of a detector that judges noise has the digest of the form of its
state, of its configuration and of the version that wrote it; if that does not fit any more, the
part is left out, and only its detector learns from the start.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import logging
import typing
from collections.abc import Iterable
from typing import Any, Protocol

import msgspec

from warpwatch_telemetry.sections import Section

logger = logging.getLogger(__name__)

# The part that comes first.
ENGINE = "engine"


class Stateful(Protocol):
    """Keeps all it remembers in ``state``, a dataclass of plain values."""

    state: Any


@dataclasses.dataclass(frozen=True, slots=True)
class SnapshotPart:
    """Whose state it is, and the configuration that it depends on, if any.

    versioned: only the version that wrote it reads it. Any other state is read by its types, so
    that an upgrade closes no anomaly: new fields need a default.
    """

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
    logger.error("the state of %s cannot be saved: %s", name, why)


def give_back(snapshot: Snapshot, parts: dict[str, SnapshotPart], version: str = "") -> set[str]:
    """Set the state of every part that fits; the names of those that start without one.

    Without the engine's, which knows what has been read already, the others mean nothing.
    """
    fresh: set[str] = set()
    for name, part in parts.items():
        saved = snapshot.parts.get(name)
        fits = saved and (not part.versioned or saved.digest == digest(part, version))
        if ENGINE in fresh or saved is None or not fits:
            fresh.add(name)
            continue
        try:
            form_of = type(part.owner.state)
            part.owner.state = msgspec.msgpack.decode(saved.state, type=form_of)
        except (msgspec.DecodeError, AttributeError, NameError, TypeError) as error:
            logger.warning("the state of %s cannot be used: %s", name, error)
            fresh.add(name)
    return fresh


def digest(part: SnapshotPart, version: str = "") -> str:
    """Changes with whatever makes a saved state meaningless."""
    config = b"" if part.config is None else part.config.model_dump_json().encode()
    kind: type = type(part.owner.state)
    text = f"{version if part.versioned else ''}\n{form(kind)}\n".encode() + config
    return hashlib.sha256(text).hexdigest()[:16]


@functools.cache
def form(of: type) -> str:
    """The fields of a dataclass (or Struct) and of all that it is made of, with their types."""
    forms: dict[str, str] = {}
    waiting = [of]
    while waiting:
        one = waiting.pop()
        if one.__qualname__ in forms:
            continue
        hints = typing.get_type_hints(one)
        forms[one.__qualname__] = ", ".join(f"{name}: {hint}" for name, hint in hints.items())
        for hint in hints.values():
            waiting.extend(inner for inner in _named(hint) if _has_fields(inner))
    return "; ".join(f"{name}({fields})" for name, fields in sorted(forms.items()))


def _has_fields(of: type) -> bool:
    return dataclasses.is_dataclass(of) or issubclass(of, msgspec.Struct)


def _named(hint: Any) -> Iterable[type]:
    """The classes that a type hint speaks of."""
    if isinstance(hint, type):
        yield hint
    for inner in typing.get_args(hint):
        yield from _named(inner)
