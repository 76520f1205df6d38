"""Where the ranks of a hanging job stand: who waits in a collective, and for whom.

Ranks whose main thread is inside torch.distributed wait for the ranks whose main thread is not.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from warpwatch.diagnosis.diagnosis import INCONCLUSIVE, SCHEMA
from warpwatch.diagnosis.errors import TraceError

MAX_BYTES = 16 << 20
_COLLECTIVE = re.compile(
    r"_?(all_?reduce|all_?gather|all_?to_?all|reduce_?scatter|reduce|broadcast|barrier|"
    r"monitored_barrier|gather|scatter|send|recv|isend|irecv|batch_isend_irecv)"
    r"(_object_list|_object|_into_tensor|_tensor|_base|_single|_coalesced|_multigpu)?"
)
_TORCH_DISTRIBUTED = re.compile(r"torch[/\\]distributed[/\\]")
# Python that torch runs on the way to every collective or model call says nothing of the place.
_TORCH = re.compile(r"[/\\]torch[/\\]")
# So many ranks are named one by one where none waits.
MAX_NAMED = 8


@dataclass(frozen=True, slots=True)
class _Place:
    """The main thread of one rank: the collective it is in, if any, and the user's own frame."""

    rank: int
    collective: str | None
    where: str


def diagnose_stacks(
    files: Sequence[str | PathLike[str]], missing: Iterable[int] = ()
) -> dict[str, Any]:
    """The JSON of a diagnosis (schema 1) whose summary says who waits for whom.

    missing: ranks that were asked and brought no file. A damaged file whose name tells its rank
    counts as missing too. Raises TraceError when no file can be used.
    """
    places: dict[int, _Place] = {}
    lost = set(missing)
    trouble: list[str] = []
    for path in map(Path, files):
        try:
            place = _read(path)
        except TraceError as error:
            trouble.append(str(error))
            named = re.search(r"rank[_-]?(\d{1,6})\.", path.name)
            lost |= {int(named[1])} if named else set()
        else:
            places[place.rank] = place
    if not places:
        raise TraceError(trouble[0] if trouble else "no stacks file was given")
    return {
        "schema": SCHEMA,
        "traces": [],
        "findings": [],
        "verdict": INCONCLUSIVE,
        "summary": _summary([places[r] for r in sorted(places)], sorted(lost - set(places))),
    }


def _summary(places: list[_Place], lost: list[int]) -> str:
    waiting = [p for p in places if p.collective]
    busy = [p for p in places if not p.collective]
    if not waiting:
        unread = f"; {_ranks(lost)} could not be read" if lost else ""
        return f"no rank waits in a collective: {_whereabouts(places)}{unread}"
    names = Counter(p.collective for p in waiting if p.collective)
    who = _ranks([p.rank for p in waiting])
    verb = "waits" if len(waiting) == 1 else "wait"
    said = f"{who} {verb} in {' and '.join(sorted(names))}"
    if busy:
        unread = f"; the stack of {_ranks(lost)} could not be read" if lost else ""
        return f"{said} for {_ranks([p.rank for p in busy])}{unread}"
    if lost:
        noun = "stack" if len(lost) == 1 else "stacks"
        return f"{said} for {_ranks(lost)}, whose {noun} could not be read"
    if len(names) > 1:
        return f"{said}: they are in different collectives ({_whereabouts(waiting)})"
    return f"{said} and none is missing: the collective itself hangs, or a rank is elsewhere"


def _whereabouts(places: list[_Place]) -> str:
    named = [f"rank {p.rank} is in {p.where}" for p in places[:MAX_NAMED]]
    more = f" and {len(places) - MAX_NAMED} more" if len(places) > MAX_NAMED else ""
    return ", ".join(named) + more


def _ranks(ranks: list[int]) -> str:
    """``rank 3``, ``ranks 1-3 and 7``."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    texts = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    listed = texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} and {texts[-1]}"
    return f"rank {listed}" if len(ranks) == 1 else f"ranks {listed}"


def _read(path: Path) -> _Place:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise TraceError(f"{path}: more than {MAX_BYTES:,} bytes of stacks")
        content = json.loads(data)
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror or error}") from None
    except (ValueError, RecursionError):
        raise TraceError(f"{path}: is cut short or not JSON") from None
    rank = content.get("rank") if isinstance(content, dict) else None
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 0:
        raise TraceError(f"{path}: no stacks file: it has no rank")
    frames = _main_frames(content.get("threads"))
    if not frames:
        raise TraceError(f"{path}: no frames of a main thread in it")
    return _Place(rank, _collective(frames), _where(frames))


def _main_frames(threads: Any) -> list[tuple[str, str, int]]:
    """(file, function, line) of the main thread, innermost last; the first thread if none is."""
    known = [t for t in threads if isinstance(t, dict)] if isinstance(threads, list) else []
    chosen = next((t for t in known if t.get("main") is True), known[0] if known else {})
    frames = chosen.get("frames")
    found = []
    for frame in frames if isinstance(frames, list) else []:
        if isinstance(frame, dict):
            line = frame.get("line")
            whole = isinstance(line, int | float) and math.isfinite(line)
            names = (_text(frame.get("file")), _text(frame.get("function")))
            found.append((*names, int(line) if whole and line is not None else 0))
    return found


def _text(value: Any) -> str:
    return value[:300] if isinstance(value, str) else "?"


def _collective(frames: list[tuple[str, str, int]]) -> str | None:
    for file, function, _ in reversed(frames):
        if _TORCH_DISTRIBUTED.search(file) and _COLLECTIVE.fullmatch(function):
            return function
    return None


def _where(frames: list[tuple[str, str, int]]) -> str:
    """The innermost frame outside torch, else the innermost of all."""
    own = [frame for frame in frames if not _TORCH.search(frame[0])]
    file, function, line = (own or frames)[-1]
    name = re.split(r"[/\\]", file)[-1]
    return f"{function} ({name}:{line})"
