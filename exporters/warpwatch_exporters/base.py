"""What the ways out have in common: an exporter turns what is known into somebody else's format.

There are three kinds, by what they are given: a renderer gets the newest state when somebody asks
for it, a writer gets every record once, in order of time, a follower gets the newest state again
and again.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from warpwatch_telemetry.records import Record
from warpwatch_telemetry.state import State


class Renderer(Protocol):
    """Called on the scrape path: no disk, no network, no lock."""

    def __call__(self, state: State, *, openmetrics: bool = False) -> bytes: ...


class Writer(Protocol):
    """``write`` takes records and says how many it wrote; raises OSError when it cannot."""

    def write(self, records: Iterable[Record]) -> int: ...

    def close(self) -> None: ...


class Follower(Protocol):
    """Brings somebody else to what the state says; has a loop of its own, for it may wait."""

    def advance(self, state: State) -> None: ...
