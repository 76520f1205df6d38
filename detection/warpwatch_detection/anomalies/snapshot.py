"""Saves the state of the engine and its detectors as bytes, so that a restart loses nothing.

Each part is saved with the version of its state's form and meaning. A part of another version is
not restored, and only its detector learns from the start. So an upgrade keeps what detectors have
learned.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from typing import Any, Protocol

import msgspec

logger = logging.getLogger(__name__)

# The part that comes first.
ENGINE = "engine"


class Stateful(Protocol):
    """An object that keeps all it remembers in ``state``, a dataclass of plain values.

    ``state_version`` is that of the state's form and meaning, ``state_form`` its type.
    """

    state: Any
    state_version: int

    @property
    def state_form(self) -> Any: ...


class SavedState(msgspec.Struct, frozen=True):
    """A saved state. Version 0.2.0 saved a digest instead of the version, which is 1 then."""

    state: msgspec.Raw
    version: int = 1


class Snapshot(msgspec.Struct, frozen=True):
    parts: dict[str, SavedState]


def save(parts: Mapping[str, Stateful]) -> bytes:
    """Return the snapshot of all parts but those that cannot be saved."""
    saved = {}
    for name, part in parts.items():
        try:
            state = msgspec.Raw(msgspec.msgpack.encode(part.state))
            saved[name] = SavedState(state, part.state_version)
        except Exception as error:
            _complain(name, str(error))
    return msgspec.msgpack.encode(Snapshot(saved))


@functools.cache
def _complain(name: str, why: str) -> None:
    """Log each reason once."""
    logger.error("the state of %s cannot be saved: %s", name, why)


def restore(snapshot: Snapshot, parts: Mapping[str, Stateful]) -> set[str]:
    """Set the state of each part that fits; return the names of those that start without one.

    If the state of the engine does not fit, no state is set, because it knows what was read.
    """
    fresh: set[str] = set()
    for name, part in parts.items():
        saved = snapshot.parts.get(name)
        if ENGINE in fresh or saved is None or saved.version != part.state_version:
            fresh.add(name)
            continue
        try:
            part.state = msgspec.msgpack.decode(saved.state, type=part.state_form)
        except (msgspec.DecodeError, AttributeError, NameError, TypeError) as error:
            logger.warning("the state of %s cannot be used: %s", name, error)
            fresh.add(name)
    return fresh
