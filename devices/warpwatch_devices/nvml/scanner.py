"""Which devices NVML names: asked now and then, by a thread that is replaced when it hangs.

A device that does not answer does not answer here either, so what it would be asked at is left
out. An index at which a search hung is left out until that call returns.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import pynvml

from warpwatch_devices.loops import Loop, Supervisor
from warpwatch_devices.nvml.call_guard import CallAbandoned, CallGuard
from warpwatch_devices.nvml.costs import CallCosts
from warpwatch_devices.nvml.library import LibraryGone, Meaning, code_of, meaning_of

READER = "scan"
MAX_REPLACEMENTS = 8


@dataclass(slots=True)
class Inventory:
    """UUIDs by index; ``silent``: indices of which it is not known who is there, ``unasked`` those
    among them that were left out."""

    index_of: dict[str, int] = field(default_factory=dict)
    silent: set[int] = field(default_factory=set)
    unasked: set[int] = field(default_factory=set)


class Search:
    """What one thread asks, which another may give up. Every method raises LibraryGone, and
    CallAbandoned once it was given up."""

    def __init__(self, costs: CallCosts, hanging: Callable[[], set[int]]) -> None:
        self.guard = CallGuard(costs, READER)
        self._costs = costs
        self._hanging = hanging

    def count(self) -> int | None:
        """None where there is no answer."""
        count: int | None = self._ask("count", pynvml.nvmlDeviceGetCount)
        return count

    def inventory(self, count: int, stuck: Iterable[int]) -> Inventory:
        """``stuck``: the indices of devices that are known not to answer."""
        inventory = Inventory()
        for index in range(count):
            if index in stuck or index in self._hanging():
                inventory.unasked.add(index)
                uuid = None
            else:
                uuid = self._identify(index)
            if uuid is None:
                inventory.silent.add(index)
            else:
                inventory.index_of[uuid] = index
        return inventory

    def _identify(self, index: int) -> str | None:
        handle = self._ask(index, pynvml.nvmlDeviceGetHandleByIndex, index)
        if handle is None:
            return None
        uuid: str | None = self._ask(index, pynvml.nvmlDeviceGetUUID, handle)
        return uuid

    def _ask(self, subject: object, call: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return self.guard.call(subject, call, *arguments)
        except pynvml.NVMLError as error:
            self._costs.add_error(READER, code_of(error))
            if meaning_of(code_of(error)) is Meaning.LIBRARY:
                raise LibraryGone from error
            return None


class Scanner:
    """Runs ``look`` with a search each ``interval_s`` from ``begin`` to ``end``."""

    def __init__(
        self, supervisor: Supervisor, interval_s: float, look: Callable[[Search], None]
    ) -> None:
        self.costs = CallCosts()
        self._supervisor = supervisor
        self._interval_s = interval_s
        self._look = look
        self._lock = threading.Lock()
        # Given up: what was being asked, an index or something else.
        self._hung: list[tuple[object, Search]] = []
        self._search: Search | None = None
        self._loop: Loop | None = None
        self._replacements = 0
        self._ended = False

    def begin(self) -> None:
        with self._lock:
            if self._ended:
                return
            search = self._search = Search(self.costs, self._hanging)
            self._loop = self._supervisor.every(
                "nvml-scan", self._interval_s, lambda: self._round(search)
            )

    def watch(self, stuck_after_s: float) -> None:
        """Replace a search that does not return. Never calls NVML; for the watchdog."""
        search = self._search
        stuck = None if search is None else search.guard.abandon_if_stuck(stuck_after_s)
        if search is not None and stuck is not None:
            self._hung.append((stuck, search))
            self._stop_loop()
            self._search = None
        elsewhere = not self.hangs or self._hanging()
        if self._search is None and elsewhere and self._replacements < MAX_REPLACEMENTS:
            self._replacements += 1
            self.begin()

    def end(self) -> None:
        with self._lock:
            self._ended = True
            if self._search is not None:
                self._search.guard.abandon()
        self._stop_loop()

    @property
    def hangs(self) -> bool:
        """Whether a search that was given up is still inside NVML."""
        return any(search.guard.in_flight for _, search in self._hung)

    @property
    def in_flight(self) -> bool:
        search = self._search
        return self.hangs or (search is not None and search.guard.in_flight)

    def _hanging(self) -> set[int]:
        """The indices at which a search hangs now."""
        return {at for at, search in self._hung if isinstance(at, int) and search.guard.in_flight}

    def _stop_loop(self) -> None:
        if self._loop is not None:
            self._loop.stop()

    def _round(self, search: Search) -> None:
        with contextlib.suppress(CallAbandoned):
            self._look(search)
