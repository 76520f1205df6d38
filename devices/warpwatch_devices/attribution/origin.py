"""Defines the interface of an origin, which knows whose work runs on which device."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from warpwatch_telemetry.samples import Attribution, DeviceSample


class OriginError(Exception):
    """Raised with one line if an origin cannot be read."""


@dataclass(frozen=True, slots=True)
class OriginAnswer:
    """The reply of an origin; ``refused`` has the invalid parts, in a few words each."""

    attributions: tuple[Attribution, ...] = ()
    refused: frozenset[str] = frozenset()


class AttributionOrigin(Protocol):
    """A source of attributions; ``name`` is the label ``origin`` of its failures.

    With ``needs_devices`` it is queried only once a device is known. The others are queried every
    second: rings of pods wait for their reply.
    """

    name: str
    needs_devices: bool

    def read(self, samples: Iterable[DeviceSample], now: float) -> OriginAnswer:
        """Read the origin at ``now`` (wall clock). Raises OriginError without a reply."""

    def close(self) -> None:
        """Release resources; most origins hold none."""
        return None
