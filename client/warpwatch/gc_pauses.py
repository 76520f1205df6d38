"""Measures the pauses of Python's garbage collector, which holds the GIL while it runs.

``gc.callbacks`` receives start and end of each collection. At most once per second the helper
thread writes the totals, and an event if the longest pause was long.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping
from contextlib import suppress
from time import monotonic_ns
from typing import Any

from warpwatch import protocol
from warpwatch.ring import RingWriter
from warpwatch.steps import StepClock

REPORT_INTERVAL_S = 1.0
LONG_PAUSE_NS = 10_000_000


class GcPauses:
    """The garbage collector's pauses; totals count from the installation on.

    ``longest_ns``, ``generation`` and ``step`` are of the longest pause since the last report;
    ``step`` is the one then running.
    """

    def __init__(self, clock: StepClock, environ: Mapping[str, str]) -> None:
        self.total_ns = 0
        self.collections = 0
        self.longest_ns = 0
        self.generation = 0
        self.step = 0
        self._clock = clock
        self._on = environ.get("WARPWATCH_GC") != "0"
        self._begun_ns = 0
        self._reported = 0
        self._next_report_s = 0.0
        # No name of this module is looked up in the callback: at the interpreter's end, when
        # it collects once more, they may be gone.
        self._monotonic_ns = monotonic_ns

    def report(self, ring: RingWriter, now_s: float) -> None:
        """Report to the ring; register again if the program cleared ``gc.callbacks``.

        Helper thread only. ``now_s`` is monotonic.
        """
        if not self._on:
            return
        if self._collected not in gc.callbacks:
            gc.callbacks.append(self._collected)
        if self.collections == self._reported or now_s < self._next_report_s:
            return
        self._next_report_s = now_s + REPORT_INTERVAL_S
        self._reported = self.collections
        longest_ns, generation, step = self.longest_ns, self.generation, self.step
        self.longest_ns = 0
        payload = protocol.GC.pack(self.total_ns, self.collections, longest_ns)
        ring.append(protocol.RECORD_GC, payload, wait_s=0.05)
        if longest_ns >= LONG_PAUSE_NS:
            duration_s = round(longest_ns / 1e9, 6)
            ring.event(
                "gc_pause", wait_s=0.05, duration_s=duration_s, generation=generation, step=step
            )

    def drop(self) -> None:
        """Stop measuring at exit and in a forked child."""
        self._on = False
        with suppress(ValueError):
            gc.callbacks.remove(self._collected)

    def _collected(self, phase: str, info: dict[str, Any]) -> None:
        """Measure a collection. It must not raise: the collector prints errors."""
        if phase == "start":
            self._begun_ns = self._monotonic_ns()
            return
        begun_ns = self._begun_ns
        # A collection at the end of a capture is not a pause of the program.
        if begun_ns and not self._clock.flags:
            pause_ns = self._monotonic_ns() - begun_ns
            self._begun_ns = 0
            self.total_ns += pause_ns
            self.collections += 1
            if pause_ns > self.longest_ns:
                self.longest_ns = pause_ns
                self.generation = info["generation"]
                self.step = max(0, self._clock.begun - 1)
