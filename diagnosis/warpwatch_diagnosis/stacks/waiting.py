"""Where the ranks of a hanging job stand: who waits in a collective, and for whom.

Ranks whose main thread is inside torch.distributed wait for the ranks whose main thread is not,
and for those that are stopped, dead, or keep their GIL.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from warpwatch_diagnosis.stacks.stacks_file import (
    HOLDS_GIL,
    STOPPED,
    RankStack,
    rank_in_name,
    read_stack,
)
from warpwatch_diagnosis.trace.errors import TraceError
from warpwatch_diagnosis.trace.reader import TraceSource
from warpwatch_diagnosis.verdict.conclusion import INCONCLUSIVE, SCHEMA

# So many ranks are named one by one where none waits.
MAX_NAMED = 8
# In training that goes on ranks seldom wait for so long.
WAITS_S = 2.0
_UNREAD = "could not be read"
# What the daemon says of a rank without stacks, and what follows for those that wait for it.
_FATES = (("stopped", "stopped"), ("died", "dead"), ("ended", "gone"), ("gone", "gone"))


def diagnose_stacks(
    files: Sequence[TraceSource], missing: Mapping[int, str] | None = None
) -> dict[str, Any]:
    """The JSON of a diagnosis (schema 1) whose summary says who waits for whom.

    missing: ranks that were asked and brought no file, and why. A damaged file whose name has
    its rank counts as missing too. Raises TraceError when no file can be used.
    """
    stacks: dict[int, RankStack] = {}
    lost = {rank: _fate(why) for rank, why in (missing or {}).items()}
    trouble: list[str] = []
    for path in files:
        try:
            stack = read_stack(path)
        except TraceError as error:
            trouble.append(str(error))
            named = rank_in_name(path)
            lost |= {} if named is None else {named: _UNREAD}
        else:
            stacks[stack.rank] = stack
    if not stacks:
        raise TraceError(trouble[0] if trouble else "no stacks file was given")
    return {
        "schema": SCHEMA,
        "traces": [],
        "findings": [],
        "verdict": INCONCLUSIVE,
        "summary": _summary(
            [stacks[rank] for rank in sorted(stacks)],
            {rank: fate for rank, fate in sorted(lost.items()) if rank not in stacks},
        ),
    }


def _summary(stacks: list[RankStack], lost: dict[int, str]) -> str:
    """``lost``: ranks without a stack, and what has become of them."""
    waiting = [s for s in stacks if s.collective and not s.silent]
    busy = [s for s in stacks if s not in waiting]
    behind = _who_is_behind(stacks)
    if waiting:
        return _who_waits_for_whom(waiting, busy, lost, behind)
    backward = [s for s in stacks if s.in_backward and not s.silent]
    others = [s for s in busy if s not in backward]
    if backward and (others or lost):
        verb = "is" if len(backward) == 1 else "are"
        return (
            f"{_ranks([s.rank for s in backward])} {verb} in backward, where ranks wait for each "
            f"other's gradients: probably for {_culprits(others, lost)}{behind}"
        )
    explained = any(s.waits_for or s.silent for s in stacks)
    lead = "" if explained else "no rank waits in a collective: "
    unread = "".join(f"; {_ranks(of)} {_is(of, fate)}" for fate, of in _by_fate(lost).items())
    return f"{lead}{_whereabouts(stacks)}{unread}{behind}"


def _who_waits_for_whom(
    waiting: list[RankStack], busy: list[RankStack], lost: dict[int, str], behind: str
) -> str:
    names = sorted({s.collective for s in waiting if s.collective})
    verb = "waits" if len(waiting) == 1 else "wait"
    text = f"{_ranks([s.rank for s in waiting])} {verb} in {' and '.join(names)}"
    if busy or lost:
        return f"{text} for {_culprits(busy, lost)}{behind}"
    if behind:
        return text + behind
    if len(names) > 1:
        return f"{text}: they are in different collectives ({_whereabouts(waiting)})"
    return f"{text} and none is missing: the collective itself hangs, or a rank is elsewhere"


def _culprits(busy: list[RankStack], lost: dict[int, str]) -> str:
    """Those that are waited for, together where the same can be said of them."""
    clauses: dict[str, list[int]] = {}
    for stack in busy:
        does = _predicate(stack)
        clauses.setdefault(f", which {does}" if does else "", []).append(stack.rank)
    fates = _by_fate(lost)
    unread = fates.pop(_UNREAD, [])
    for fate, ranks in fates.items():
        clauses.setdefault(f", which {_is(ranks, fate)}", []).extend(ranks)
    parts = [_ranks(ranks) + clause for clause, ranks in clauses.items()]
    noun = "stack" if len(unread) == 1 else "stacks"
    if unread and not parts:
        return f"{_ranks(unread)}, whose {noun} {_UNREAD}"
    more = f"; the {noun} of {_ranks(unread)} {_UNREAD}" if unread else ""
    return " and for ".join(parts) + more


def _predicate(stack: RankStack) -> str:
    """What the rank does, where more than its line is known."""
    if stack.silent == STOPPED:
        return f"is stopped in {stack.where}"
    if stack.silent == HOLDS_GIL:
        thread = f" of thread {stack.thread}" if stack.thread else ""
        return f"is inside a C call{thread} in {stack.where} that holds the GIL"
    if stack.waits_for is None:
        return ""
    also = [f"thread {name} in {where}" for name, where in stack.locked[:3]]
    too = f", as does {', '.join(also)}" if also and stack.waits_for == "a lock" else ""
    return f"waits for {stack.waits_for} in {stack.where}{too}"


def _whereabouts(stacks: list[RankStack]) -> str:
    named = [f"rank {s.rank} {_predicate(s) or 'is in ' + s.where}" for s in stacks[:MAX_NAMED]]
    more = f" and {len(stacks) - MAX_NAMED} more" if len(stacks) > MAX_NAMED else ""
    return ", ".join(named) + more


def _who_is_behind(stacks: list[RankStack]) -> str:
    """Who never entered the collective in which a peer waits.

    The stacks of a job that goes on are not of the same moment: a newer collective alone says
    nothing of who has not come to it yet.
    """
    newest: dict[str, dict[int, int]] = {}
    names: dict[tuple[str, int], str] = {}
    for stack in stacks:
        for entry in stack.recorded:
            ranks = newest.setdefault(entry.group, {})
            ranks[stack.rank] = max(entry.sequence, ranks.get(stack.rank, entry.sequence))
            names.setdefault((entry.group, entry.sequence), entry.name)
    for group, ranks in newest.items():
        last = min(ranks.values())
        behind = [rank for rank, sequence in ranks.items() if sequence == last]
        if any(_has_waited(peer, group, last, stacks, behind) for peer in stacks):
            missed = names.get((group, last + 1), "collective")
            return f"; {_ranks(behind)} never entered {missed} #{last + 1}"
    return ""


def _has_waited(
    peer: RankStack, group: str, last: int, stacks: list[RankStack], behind: list[int]
) -> bool:
    """Whether it was in a later collective than ``last`` before those behind were looked at."""
    seen = min((s.time for s in stacks if s.rank in behind and s.time is not None), default=None)
    return any(
        entry.group == group
        and entry.sequence > last
        and entry.waits
        and (seen is None or entry.time is None or entry.time <= seen - WAITS_S)
        for entry in peer.recorded
    )


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
