"""Lines of the user's code in which a part of the step was spent, from recorded Python frames."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from warpwatch_diagnosis.measures.intervals import Intervals, total
from warpwatch_diagnosis.measures.places import Instant, of_instants
from warpwatch_diagnosis.trace.events import Event

# As a sampling profiler: a line that takes a tenth of the time has about twenty of these.
SAMPLES = 200
TOP = 3


@dataclass(frozen=True, slots=True)
class Line:
    """``place``: ``file.py(12): function``; ``us``: of the time that was looked at, estimated."""

    place: str
    us: float


def lines(
    frames: Sequence[Event], threads: set[str], parts: Mapping[str, Intervals]
) -> dict[str, tuple[Line, ...]]:
    """For each of the named parts of the window the lines that take most of it, at most TOP.

    Samples the innermost own frame at even distances. Nothing without Python frames.
    """
    if not frames or not threads:
        return {}
    instants = {name: _instants(intervals) for name, intervals in parts.items()}
    wanted: set[Instant] = {
        (thread, at_us) for found in instants.values() for at_us in found for thread in threads
    }
    places = of_instants(frames, wanted)
    return {
        name: _lines(total(parts[name]), found, threads, places) for name, found in instants.items()
    }


def _instants(intervals: Intervals) -> list[float]:
    """Even distances in the time that the intervals have together."""
    distance = total(intervals) / SAMPLES
    found: list[float] = []
    passed = 0.0
    for begin, end in intervals:
        while len(found) < SAMPLES:
            at_us = begin + distance * (len(found) + 0.5) - passed
            if at_us > end:
                break
            found.append(at_us)
        passed += end - begin
    return found


def _lines(
    took_us: float, instants: list[float], threads: set[str], places: Mapping[Instant, str]
) -> tuple[Line, ...]:
    counts = Counter(
        place
        for at_us in instants
        for thread in sorted(threads)
        if (place := places.get((thread, at_us))) is not None
    )
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return tuple(Line(place, took_us * count / SAMPLES) for place, count in ordered[:TOP])
