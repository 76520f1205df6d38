"""Which devices NVML names: asked now and then, by a thread that is replaced when it hangs.

A device that does not answer does not answer here either, so what it would be asked at is left
out. An index at which a search hung is left out until that call returns.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import pynvml

from warpwatch_devices.nvml.costs import CallCosts
from warpwatch_devices.nvml.library import LibraryGone, Meaning, code_of, meaning_of
from warpwatch_runtime.call_guard import CallGuard, GuardedLoop
from warpwatch_runtime.supervisor import LoopRunner

READER = "scan"
INTERVAL_S = 10.0
MAX_REPLACEMENTS = 8


@dataclass(slots=True)
class DeviceListing:
    """UUIDs by index; ``silent``: indices of which it is not known who is there, ``unasked`` those
    among them that were left out."""

    index_of: dict[str, int] = field(default_factory=dict)
    silent: set[int] = field(default_factory=set)
    unasked: set[int] = field(default_factory=set)


class Search:
    """What one thread asks, which another may give up. Every method raises LibraryGone, and
    CallAbandoned once it was given up."""

    def __init__(self, guard: CallGuard, costs: CallCosts, hanging: Callable[[], set[int]]) -> None:
        self._guard = guard
        self._costs = costs
        self._hanging = hanging

    def count(self) -> int | None:
        """None where there is no answer."""
        count: int | None = self._ask("count", pynvml.nvmlDeviceGetCount)
        return count

    def listing(self, count: int, stuck: Iterable[int]) -> DeviceListing:
        """``stuck``: the indices of devices that are known not to answer."""
        listing = DeviceListing()
        for index in range(count):
            if index in stuck or index in self._hanging():
                listing.unasked.add(index)
                uuid = None
            else:
                uuid = self._identify(index)
            if uuid is None:
                listing.silent.add(index)
            else:
                listing.index_of[uuid] = index
        return listing

    def _identify(self, index: int) -> str | None:
        handle = self._ask(index, pynvml.nvmlDeviceGetHandleByIndex, index)
        if handle is None:
            return None
        uuid: str | None = self._ask(index, pynvml.nvmlDeviceGetUUID, handle)
        return uuid

    def _ask(self, subject: object, call: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return self._guard.call(subject, self._costs.measure, READER, call, *arguments)
        except pynvml.NVMLError as error:
            if meaning_of(code_of(error)) is Meaning.LIBRARY:
                raise LibraryGone from error
            return None


class Scanner:
    """Runs ``look`` with a search each INTERVAL_S from ``begin`` to ``end``."""

    def __init__(
        self,
        supervisor: LoopRunner,
        look: Callable[[Search], None],
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.costs = CallCosts()
        self._loop = GuardedLoop(
            supervisor,
            "nvml-scan",
            INTERVAL_S,
            lambda guard: look(Search(guard, self.costs, self._hanging)),
            MAX_REPLACEMENTS,
            monotonic,
        )

    def begin(self) -> None:
        self._loop.begin()

    def watch(self, stuck_after_s: float) -> None:
        """Replace a search that does not return. Never calls NVML; for the watchdog."""
        self._loop.give_up_if_stuck(stuck_after_s)
        # One that hangs at no index would hang again.
        elsewhere = not self.hangs or self._hanging()
        if elsewhere:
            self._loop.begin()

    def end(self) -> None:
        self._loop.close(0.0)

    @property
    def hangs(self) -> bool:
        """Whether a search that was given up is still inside NVML."""
        return bool(self._loop.hanging)

    @property
    def in_flight(self) -> bool:
        return self._loop.in_flight

    def _hanging(self) -> set[int]:
        """The indices at which a search hangs now."""
        return {subject for subject in self._loop.hanging if isinstance(subject, int)}
