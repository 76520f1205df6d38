"""Lines of the user's code behind an operator or a call: from stacks, where the trace has them."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from functools import lru_cache

from warpwatch_diagnosis.trace.reader import Event

# A thread and a time in µs.
Instant = tuple[str, float]

# Frames of Python itself, of installed packages and of builtins are nobody's own code.
_FOREIGN = re.compile(
    r"<built-in|<frozen|<string>|<eval_with_key>|nn\.Module: |(^|/)(site|dist)-packages/"
    r"|(^|/)lib/python\d|^torch/|^python\d?[./]|(^|/)runpy\.py|^threading\.py|^contextlib\.py"
    r"|torchinductor_\w+/"
)
_FRAME = re.compile(r"(?P<file>[^()]+)\((?P<line>\d+)\): (?P<function>.+)")
MAX_PLACE = 200
# How many path components of a file are shown: enough to find it, without a home directory.
_COMPONENTS = 3


@lru_cache(maxsize=65_536)
def own_frame(frame: str) -> str | None:
    """``file.py(12): function`` of the user's code, the path's end only; else None."""
    match = _FRAME.match(frame)
    if match is None or _FOREIGN.search(frame):
        return None
    file = "/".join(match["file"].split("/")[-_COMPONENTS:])
    return f"{file}({match['line']}): {match['function']}"[:MAX_PLACE]


def of_stack(stack: str) -> str | None:
    """The innermost own frame of an operator's ``Call stack``, innermost frame first."""
    return next((place for f in stack.split(";") if (place := own_frame(f.strip()))), None)


def of_instants(frames: Sequence[Event], instants: Iterable[Instant]) -> dict[Instant, str]:
    """The innermost own frame around each instant, from ``python_function`` events."""
    wanted: dict[str, list[float]] = {}
    for thread, at_us in sorted(set(instants)):
        wanted.setdefault(thread, []).append(at_us)
    inner: dict[Instant, tuple[float, float, str]] = {}
    for frame in frames:
        times = wanted.get(frame.thread)
        if times is None or frame.end_us < times[0]:
            continue
        index = bisect_left(times, frame.begin_us)
        if index == len(times) or times[index] > frame.end_us:
            continue
        place = own_frame(frame.name)
        if place is None:
            continue
        found = (frame.begin_us, -frame.end_us, place)
        while index < len(times) and times[index] <= frame.end_us:
            at = (frame.thread, times[index])
            if at not in inner or found > inner[at]:
                inner[at] = found
            index += 1
    return {at: place for at, (_, _, place) in inner.items()}
