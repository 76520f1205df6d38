"""Finds the lines of the user's code behind a call or an operator, or in a part of the step.

They come from stacks and from recorded Python frames, if the trace has them. The call, operator or
annotation that the host was in is found in the same way.
"""

from __future__ import annotations

import re
import sys
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from warpwatch_diagnosis.intervals import Intervals, total
from warpwatch_diagnosis.trace.events import TraceEvent

# A thread and a time in µs.
Instant = tuple[str, float]
# Begin, negative end in µs and line: the inner one of two frames is the larger one.
_OwnFrame = tuple[float, float, str]

# Frames of Python itself, of installed packages and of builtins are not the user's own code.
_FOREIGN = re.compile(
    r"<built-in|<frozen|<string>|<eval_with_key>|nn\.Module: |(^|/)(site|dist)-packages/"
    r"|(^|/)lib/python\d|^torch/|^python\d?[./]|(^|/)runpy\.py"
    r"|torchinductor_\w+/"
)
# Profilers cut what sys.path begins with, so that a module of the standard library stands alone.
_INSTALLED = sys.stdlib_module_names | {"warpwatch"}
_FIRST = re.compile(r"\.py\(|/")
_FRAME = re.compile(r"(?P<file>[^()]+)\((?P<line>\d+)\): (?P<function>.+)")
_MAX_CHARS = 200
# This many path components show where a file is without naming a home directory.
_COMPONENTS = 3
# As with a sampling profiler, a line that takes a tenth of the time has about 20 of the samples.
SAMPLES = 200
MAX_LINES = 3


@dataclass(frozen=True, slots=True)
class CodeLine:
    """A place, ``file.py(12): function`` or the name of an event, and its estimated time in µs."""

    place: str
    us: float


@lru_cache(maxsize=65_536)
def own_line(frame: str) -> str | None:
    """Return ``file.py(12): function`` with the end of the path, or None for foreign code."""
    match = _FRAME.match(frame)
    if match is None or _FOREIGN.search(frame) or _FIRST.split(frame, 1)[0] in _INSTALLED:
        return None
    file = "/".join(match["file"].split("/")[-_COMPONENTS:])
    return f"{file}({match['line']}): {match['function']}"[:_MAX_CHARS]


def line_of_stack(stack: str) -> str | None:
    """Return the first own frame of a ``Call stack``, which lists the innermost frame first."""
    return next((line for f in stack.split(";") if (line := own_line(f.strip()))), None)


def event_name(name: str) -> str | None:
    """Return the name of an event that the host was in, except for a step."""
    return None if name.startswith("ProfilerStep") else name[:_MAX_CHARS]


def lines_at(
    frames: Iterable[TraceEvent],
    instants: Iterable[Instant],
    named: Callable[[str], str | None] = own_line,
) -> dict[Instant, str]:
    """Return the innermost event around each instant that has a name by ``named``.

    By default this is the innermost own frame of ``python_function`` events.
    """
    wanted: dict[str, list[float]] = {}
    for thread, at_us in sorted(set(instants)):
        wanted.setdefault(thread, []).append(at_us)
    own: dict[str, list[_OwnFrame]] = {}
    for frame in frames:
        times = wanted.get(frame.thread, [])
        index = bisect_left(times, frame.begin_us)
        if index < len(times) and times[index] <= frame.end_us:
            line = named(frame.name)
            if line is not None:
                found = (frame.begin_us, -frame.end_us, line)
                own.setdefault(frame.thread, []).append(found)
    return {
        (thread, at_us): line
        for thread, found in own.items()
        for at_us, line in _innermost(sorted(found), wanted[thread])
    }


def _innermost(frames: list[_OwnFrame], times: list[float]) -> Iterator[tuple[float, str]]:
    """Yield the last of the frames around each time; both are sorted.

    An ended frame is never checked again, so frames around all of the times cost no more.
    """
    around: list[_OwnFrame] = []
    following = 0
    for at_us in times:
        while following < len(frames) and frames[following][0] <= at_us:
            around.append(frames[following])
            following += 1
        while around and -around[-1][1] < at_us:
            around.pop()
        if around:
            yield at_us, around[-1][2]


def longest_lines(
    frames: Sequence[TraceEvent],
    threads: set[str],
    parts: Mapping[str, Intervals],
    named: Callable[[str], str | None] = own_line,
) -> dict[str, tuple[CodeLine, ...]]:
    """Return for each named part of the window the MAX_LINES lines that take most of it.

    The innermost own frame (or event with a name by ``named``) is sampled at even distances.
    """
    parts = {name: spent for name, spent in parts.items() if spent}
    if not frames or not threads or not parts:
        return {}
    samples = {
        name: [(thread, at_us) for at_us in _even_times(spent) for thread in sorted(threads)]
        for name, spent in parts.items()
    }
    wanted = (instant for instants in samples.values() for instant in instants)
    lines = lines_at(frames, wanted, named)
    found = {}
    for name, instants in samples.items():
        counts = Counter(lines[at] for at in instants if at in lines)
        longest = sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:MAX_LINES]
        us = total(parts[name])
        found[name] = tuple(CodeLine(line, us * count / SAMPLES) for line, count in longest)
    return found


def _even_times(intervals: Intervals) -> list[float]:
    """Return SAMPLES times at even distances within the intervals."""
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
