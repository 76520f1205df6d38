"""Saves the state of the engine and its detectors as bytes, so that a restart loses nothing.

Every part is saved by its name with the version of its state. A part of another version is left
out, and only its detector learns from the start. The versions are those of the states' forms and
meanings, not of the program: an upgrade keeps what detectors have learned.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from typing import Any, Protocol

import msgspec

logger = logging.getLogger(__name__)

# The part that comes first.
ENGINE = "engine"


class Stateful(Protocol):
    """Keeps all it remembers in ``state``, a dataclass of plain values."""

    state: Any


@dataclasses.dataclass(frozen=True, slots=True)
class SnapshotPart:
    """The owner of a state, and the version of the state's form and meaning.

    form: the type that the state is decoded as, if it is not the state's own.
    """

    owner: Stateful
    version: int = 1
    form: Any = None


class SavedState(msgspec.Struct, frozen=True):
    """A saved state. version: 1 for states of 0.2.0, which saved a digest in its place."""

    state: msgspec.Raw
    version: int = 1


class Snapshot(msgspec.Struct, frozen=True):
    parts: dict[str, SavedState]


def save(parts: dict[str, SnapshotPart]) -> bytes:
    """Return the snapshot of all parts; what cannot be saved is left out."""
    saved = {}
    for name, part in parts.items():
        try:
            state = msgspec.Raw(msgspec.msgpack.encode(part.owner.state))
            saved[name] = SavedState(state, part.version)
        except Exception as error:
            _complain(name, str(error))
    return msgspec.msgpack.encode(Snapshot(saved))


@functools.cache
def _complain(name: str, why: str) -> None:
    """Log each reason once."""
    logger.error("the state of %s cannot be saved: %s", name, why)


def restore(snapshot: Snapshot, parts: dict[str, SnapshotPart]) -> set[str]:
    """Set the state of every part that fits; return the names of those that start without one.

    Without the engine's, which knows what has been read already, the others mean nothing.
    """
    fresh: set[str] = set()
    for name, part in parts.items():
        saved = snapshot.parts.get(name)
        if ENGINE in fresh or saved is None or saved.version != part.version:
            fresh.add(name)
            continue
        try:
            form = part.form or type(part.owner.state)
            part.owner.state = msgspec.msgpack.decode(saved.state, type=form)
        except (msgspec.DecodeError, AttributeError, NameError, TypeError) as error:
            logger.warning("the state of %s cannot be used: %s", name, error)
            fresh.add(name)
    return fresh
