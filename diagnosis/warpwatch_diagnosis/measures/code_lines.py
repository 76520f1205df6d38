"""Lines of the user's code: behind a call or an operator, and where a part of the step was spent.

They come from stacks and from recorded Python frames, where the trace has them. What the host was
in, a call, an operator or an annotation, is found in the same way.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from warpwatch_diagnosis.measures.intervals import Intervals, total
from warpwatch_diagnosis.trace.events import TraceEvent

# A thread and a time in µs.
Instant = tuple[str, float]
# Begin and negative end in µs, so that of two the inner one is the larger, and the line.
_OwnFrame = tuple[float, float, str]

# Frames of Python itself, of installed packages and of builtins are not the user's own code.
_FOREIGN = re.compile(
    r"<built-in|<frozen|<string>|<eval_with_key>|nn\.Module: |(^|/)(site|dist)-packages/"
    r"|(^|/)lib/python\d|^torch/|^python\d?[./]|(^|/)runpy\.py|^threading\.py|^contextlib\.py"
    r"|torchinductor_\w+/"
)
_FRAME = re.compile(r"(?P<file>[^()]+)\((?P<line>\d+)\): (?P<function>.+)")
_MAX_CHARS = 200
# How many path components of a file are shown: enough to find it, without a home directory.
_COMPONENTS = 3
# As a sampling profiler: a line that takes a tenth of the time has about twenty of these.
SAMPLES = 200
TOP = 3


@dataclass(frozen=True, slots=True)
class CodeLine:
    """``place``: ``file.py(12): function``, or the name of an event; ``us``: of the time that was
    looked at, estimated."""

    place: str
    us: float


@lru_cache(maxsize=65_536)
def own_line(frame: str) -> str | None:
    """``file.py(12): function`` of the user's code, the path's end only; else None."""
    match = _FRAME.match(frame)
    if match is None or _FOREIGN.search(frame):
        return None
    file = "/".join(match["file"].split("/")[-_COMPONENTS:])
    return f"{file}({match['line']}): {match['function']}"[:_MAX_CHARS]


def line_of_stack(stack: str) -> str | None:
    """The innermost own frame of an operator's ``Call stack``, innermost frame first."""
    return next((line for f in stack.split(";") if (line := own_line(f.strip()))), None)


def event_name(name: str) -> str | None:
    """For what the host was in; a step is no answer."""
    return None if name.startswith("ProfilerStep") else name[:_MAX_CHARS]


def lines_at(
    frames: Iterable[TraceEvent],
    instants: Iterable[Instant],
    named: Callable[[str], str | None] = own_line,
) -> dict[Instant, str]:
    """The innermost event around each instant that has a name by ``named``: of ``python_function``
    events the innermost own frame."""
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
    """The last of the frames around each time; both in order.

    A frame that has ended is never looked at again, so that frames around all of the times cost no
    more than others.
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
    """For each of the named parts of the window the lines that take most of it, at most TOP.

    Samples the innermost own frame (``named``: as lines_at takes it) at even distances. Nothing
    without frames.
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
        longest = sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:TOP]
        us = total(parts[name])
        found[name] = tuple(CodeLine(line, us * count / SAMPLES) for line, count in longest)
    return found


def _even_times(intervals: Intervals) -> list[float]:
    """SAMPLES times at even distances in the time that the intervals have together."""
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
