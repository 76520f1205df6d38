"""Provides the GPU's events of a trace with the calls that launched them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

from warpwatch_diagnosis.measures.intervals import Interval
from warpwatch_diagnosis.trace.events import RuntimeCalls, TraceEvent, by_begin
from warpwatch_diagnosis.trace.reader import Trace

ALL_TO_ALL = re.compile(r"all_?to_?all", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class GpuEvents:
    """A trace's kernels and copies by begin, and both together in ``events``.

    window: the time that is measured. calls: the calls of the runtime. exchanges: the all-to-alls
    among the host's operators and annotations, by begin.
    """

    window: Interval
    kernels: Sequence[TraceEvent]
    copies: Sequence[TraceEvent]
    events: Sequence[TraceEvent]
    calls: RuntimeCalls
    exchanges: Sequence[TraceEvent]

    @classmethod
    def of(cls, trace: Trace, window: Interval) -> GpuEvents:
        kernels, copies = trace.events["kernel"], trace.events["copy"]
        host = trace.events["annotation"] + trace.events["operator"]
        exchanging = {name for name in {e.name for e in host} if ALL_TO_ALL.search(name)}
        return cls(
            window=window,
            kernels=by_begin(kernels, _order),
            copies=by_begin(copies, _order),
            events=by_begin(kernels + copies, _order),
            calls=by_correlation(trace.events["runtime"]),
            exchanges=sorted((e for e in host if e.name in exchanging), key=attrgetter("begin_us")),
        )

    @property
    def threads(self) -> set[str]:
        """The threads that launch GPU work."""
        calls = self.calls
        return {call.thread for e in self.events if (call := calls.get(e.correlation))}

    def of_device(self, name: str) -> GpuEvents:
        return replace(
            self,
            kernels=[e for e in self.kernels if device_of(e) == name],
            copies=[e for e in self.copies if device_of(e) == name],
            events=[e for e in self.events if device_of(e) == name],
        )


def by_correlation(events: Iterable[TraceEvent]) -> RuntimeCalls:
    """Return the first event of each correlation; the order of ``events`` does not matter."""
    ordered = by_begin(events, attrgetter("end_us", "thread", "name"))
    found = {event.correlation: event for event in reversed(ordered)}
    found.pop(None, None)
    return found


def device_of(event: TraceEvent) -> str:
    """Return the index of the device: an argument of the event, else its process ID."""
    index = event.whole("device")
    return event.thread.partition("/")[0] if index is None else str(index)


def _order(event: TraceEvent) -> tuple[float, int, str, str]:
    """Return the order among events that begin at one instant."""
    return event.end_us, event.correlation or -1, event.thread, event.name
