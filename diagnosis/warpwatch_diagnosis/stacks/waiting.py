"""Where the ranks of a hanging job stand: who waits in a collective, and for whom.

Ranks whose main thread is inside torch.distributed wait for the ranks whose main thread is not,
and for those that are stopped, dead, or keep their GIL.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from warpwatch_diagnosis.stacks.stacks_file import (
    HOLDS_GIL,
    STOPPED,
    Entry,
    Place,
    named_rank,
    read_place,
)
from warpwatch_diagnosis.trace.errors import TraceError
from warpwatch_diagnosis.verdict.conclusion import INCONCLUSIVE, SCHEMA

# So many ranks are named one by one where none waits.
MAX_NAMED = 8
_UNREAD = "could not be read"
# What the daemon says of a rank without stacks, and what follows for those that wait for it.
_FATES = (("stopped", "stopped"), ("died", "dead"), ("ended", "gone"), ("gone", "gone"))


def diagnose_stacks(
    files: Sequence[str | PathLike[str]], missing: Mapping[int, str] | None = None
) -> dict[str, Any]:
    """The JSON of a diagnosis (schema 1) whose summary says who waits for whom.

    missing: ranks that were asked and brought no file, and why. A damaged file whose name tells
    its rank counts as missing too. Raises TraceError when no file can be used.
    """
    places: dict[int, Place] = {}
    lost = {rank: _fate(why) for rank, why in (missing or {}).items()}
    trouble: list[str] = []
    for path in map(Path, files):
        try:
            place = read_place(path)
        except TraceError as error:
            trouble.append(str(error))
            named = named_rank(path)
            lost |= {} if named is None else {named: _UNREAD}
        else:
            places[place.rank] = place
    if not places:
        raise TraceError(trouble[0] if trouble else "no stacks file was given")
    return {
        "schema": SCHEMA,
        "traces": [],
        "findings": [],
        "verdict": INCONCLUSIVE,
        "summary": _summary(
            [places[r] for r in sorted(places)],
            {rank: fate for rank, fate in sorted(lost.items()) if rank not in places},
        ),
    }


def _summary(places: list[Place], lost: dict[int, str]) -> str:
    waiting = [p for p in places if p.collective and not p.silent]
    busy = [p for p in places if p not in waiting]
    behind = _behind(places)
    if waiting:
        return _for_whom(waiting, busy, lost, behind)
    backward = [p for p in places if p.in_backward and not p.silent]
    others = [p for p in busy if p not in backward]
    if backward and (others or lost):
        verb = "is" if len(backward) == 1 else "are"
        return (
            f"{_ranks([p.rank for p in backward])} {verb} in backward, where ranks wait for each "
            f"other's gradients: probably for {_culprits(others, lost)}{behind}"
        )
    told = any(p.waits_for or p.silent for p in places)
    lead = "" if told else "no rank waits in a collective: "
    unread = "".join(f"; {_ranks(of)} {_is(of, fate)}" for fate, of in _by_fate(lost).items())
    return f"{lead}{_whereabouts(places)}{unread}{behind}"


def _for_whom(waiting: list[Place], busy: list[Place], lost: dict[int, str], behind: str) -> str:
    names = sorted(Counter(p.collective for p in waiting if p.collective))
    verb = "waits" if len(waiting) == 1 else "wait"
    said = f"{_ranks([p.rank for p in waiting])} {verb} in {' and '.join(names)}"
    if busy or lost:
        return f"{said} for {_culprits(busy, lost)}{behind}"
    if behind:
        return said + behind
    if len(names) > 1:
        return f"{said}: they are in different collectives ({_whereabouts(waiting)})"
    return f"{said} and none is missing: the collective itself hangs, or a rank is elsewhere"


def _culprits(busy: list[Place], lost: dict[int, str]) -> str:
    """Those that are waited for, together where the same can be said of them."""
    clauses: dict[str, list[int]] = {}
    for place in busy:
        clauses.setdefault(_clause(place), []).append(place.rank)
    fates = _by_fate(lost)
    unread = fates.pop(_UNREAD, [])
    for fate, ranks in fates.items():
        clauses.setdefault(f"which {_is(ranks, fate)}", []).extend(ranks)
    parts = [
        f"{_ranks(ranks)}{', ' + clause if clause else ''}" for clause, ranks in clauses.items()
    ]
    noun = "stack" if len(unread) == 1 else "stacks"
    if unread and not parts:
        return f"{_ranks(unread)}, whose {noun} {_UNREAD}"
    more = f"; the {noun} of {_ranks(unread)} {_UNREAD}" if unread else ""
    return " and for ".join(parts) + more


def _clause(place: Place) -> str:
    predicate = _predicate(place)
    return f"which {predicate}" if predicate else ""


def _predicate(place: Place) -> str:
    """What the rank does, where more than its place is known."""
    if place.silent == STOPPED:
        return f"is stopped in {place.where}"
    if place.silent == HOLDS_GIL:
        thread = f" of thread {place.thread}" if place.thread else ""
        return f"is inside a C call{thread} in {place.where} that holds the GIL"
    if place.waits_for is None:
        return ""
    also = [f"thread {name} in {where}" for name, where in place.locked[:3]]
    too = f", as does {', '.join(also)}" if also and place.waits_for == "a lock" else ""
    return f"waits for {place.waits_for} in {place.where}{too}"


def _whereabouts(places: list[Place]) -> str:
    named = [f"rank {p.rank} {_predicate(p) or 'is in ' + p.where}" for p in places[:MAX_NAMED]]
    more = f" and {len(places) - MAX_NAMED} more" if len(places) > MAX_NAMED else ""
    return ", ".join(named) + more


def _behind(places: list[Place]) -> str:
    """Whose newest collective is older than the others': it never entered the next one."""
    newest: dict[str, dict[int, Entry]] = {}
    for place in places:
        for entry in place.entries:
            ranks = newest.setdefault(entry.group, {})
            if place.rank not in ranks or entry.sequence > ranks[place.rank].sequence:
                ranks[place.rank] = entry
    for group, ranks in newest.items():
        last = min(entry.sequence for entry in ranks.values())
        slow = [rank for rank, entry in ranks.items() if entry.sequence == last]
        named = [
            entry.name
            for place in places
            for entry in place.entries
            if entry.group == group and entry.sequence == last + 1
        ]
        if len(slow) < len(ranks):
            what = named[0] if named else "collective"
            return f"; {_ranks(slow)} never entered {what} #{last + 1}"
    return ""


def _fate(why: str) -> str:
    return next((fate for word, fate in _FATES if word in why), _UNREAD)


def _by_fate(lost: dict[int, str]) -> dict[str, list[int]]:
    fates: dict[str, list[int]] = {}
    for rank, fate in lost.items():
        fates.setdefault(fate, []).append(rank)
    return fates


def _is(ranks: list[int], fate: str) -> str:
    if fate == _UNREAD:
        return fate
    return f"{'is' if len(ranks) == 1 else 'are'} {fate}"


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
