"""What an origin is: one that knows whose work runs on which device."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from warpwatch_telemetry.samples import Attribution, DeviceSample


class OriginError(Exception):
    """The origin could not be read; its text says why in one line."""


@dataclass(frozen=True, slots=True)
class OriginAnswer:
    """``refused``: single pieces that could not be believed, each in a few words."""

    attributions: tuple[Attribution, ...] = ()
    refused: frozenset[str] = frozenset()


class AttributionOrigin(Protocol):
    """``name`` is the value of the label ``origin`` under which its failures are counted.

    needs_devices: whether there is nothing to ask before a device is known. Who needs none is asked
    each second: rings of pods wait for its answer.
    """

    name: str
    needs_devices: bool

    def read(self, samples: Iterable[DeviceSample], now: float) -> OriginAnswer:
        """``now``: wall clock in seconds. Raises OriginError when there was no answer."""

    def close(self) -> None:
        """Give back what it holds; most hold nothing."""
        return None
