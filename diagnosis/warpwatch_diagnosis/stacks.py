"""Finds from the stacks of a hanging job which ranks wait in a collective, and for which ones.

Ranks whose main thread is inside torch.distributed wait for the ranks whose main thread is not,
and for ranks that are stopped, dead, or keep their GIL.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from warpwatch_diagnosis.diagnosis import untimed_json
from warpwatch_diagnosis.rules.base import Confidence, advice, finding_json
from warpwatch_diagnosis.trace.events import grouped
from warpwatch_diagnosis.trace.files import (
    TraceError,
    TraceSource,
    dicts,
    load_json,
    number_of,
    rank_in_name,
    text_of,
)
from warpwatch_diagnosis.words import listed

MAX_LINE = 2**31
STOPPED = "stopped"
HOLDS_GIL = "holds the GIL"
_COLLECTIVE = re.compile(
    r"_?(all_?reduce|all_?gather|all_?to_?all|reduce_?scatter|reduce|broadcast|barrier|"
    r"monitored_barrier|gather|scatter|send|recv|isend|irecv|batch_isend_irecv)"
    r"(_object_list|_object|_into_tensor|_tensor|_base|_single|_coalesced|_multigpu)?"
)
_TORCH_DISTRIBUTED = re.compile(r"torch[/\\]distributed[/\\]")
# Frames of torch and of the standard library do not show where the program is.
_NOT_OWN = re.compile(
    r"[/\\]torch[/\\]|[/\\]python3\.\d+[/\\](?!site-packages|dist-packages)|<frozen "
)
_AUTOGRAD = re.compile(r"torch[/\\](autograd[/\\](graph|__init__)|_tensor)\.py$")
# The end of a file, functions in it, and the thing that such a frame waits for. The outermost one
# counts.
_WAITS = (
    (r"torch[/\\]utils[/\\]data[/\\]dataloader\.py", r"_(try_)?get_data|_next_data", "its data"),
    (r"[/\\]queue\.py", "get|put|join", "a queue"),
    (r"[/\\]threading\.py", "join|_join|_wait_for_tstate_lock", "a thread to end"),
    (r"[/\\]threading\.py", "wait|wait_for", "an event"),
    (r"[/\\]threading\.py", "acquire|__enter__", "a lock"),
    (r"[/\\](subprocess|popen_fork|popen_spawn_posix|process)\.py", "wait|join", "a process"),
)
# A frame that waits for a lock is in one of these C functions.
_LOCK_CALLS = ("acquire", "__enter__")


class Frame(NamedTuple):
    file: str
    function: str
    line: int


class RecordedCollective(NamedTuple):
    """A collective of the Flight Recorder: its number in its process group, and its name.

    waits: entered and not completed. time: the wall clock when it was entered, if known.
    """

    group: str
    sequence: int
    name: str
    waits: bool
    time: float | None


@dataclass(frozen=True, slots=True)
class RankStack:
    """The main thread of one rank, or the thread that holds the GIL.

    thread: the name of a thread other than the main one. collective: the one that it is in. where:
    the user's own innermost frame. waits_for: the thing that it waits for there, if known. silent:
    STOPPED or HOLDS_GIL for a process that could not answer. locked: other threads that wait for a
    lock, (name, where). recorded: its newest collectives. time: the wall clock, if known.
    """

    rank: int
    collective: str | None
    where: str
    thread: str = ""
    waits_for: str | None = None
    in_backward: bool = False
    silent: str | None = None
    locked: tuple[tuple[str, str], ...] = ()
    recorded: tuple[RecordedCollective, ...] = ()
    time: float | None = None


def read_stack(path: TraceSource) -> RankStack:
    """Read a stacks file. Raises TraceError if it is not one."""
    content = load_json(path)
    rank = content.get("rank") if isinstance(content, dict) else None
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 0:
        raise TraceError(f"{path}: no stacks file: it has no rank")
    if rank_in_name(path.name) not in (None, rank):
        raise TraceError(f"{path}: it says that it is another rank's")
    silent = content.get("silent_reason")
    threads = dicts(content.get("threads"))
    main = next((t for t in threads if t.get("main") is True), threads[0] if threads else {})
    holder = next((t for t in threads if t.get("gil") is True), main)
    chosen = holder if silent == HOLDS_GIL else main
    frames = _frames(chosen)
    if not frames:
        raise TraceError(f"{path}: no frames of a main thread in it")
    waiting = [(t, _frames(t)) for t in threads if t is not chosen and _in_lock(t)]
    return RankStack(
        rank,
        _collective(frames),
        _where(frames),
        thread="" if chosen is main else text_of(chosen.get("name")),
        waits_for="a lock" if _in_lock(chosen) else _waits_for(frames),
        in_backward=any(_AUTOGRAD.search(f.file) and "backward" in f.function for f in frames),
        silent=silent if silent in (STOPPED, HOLDS_GIL) else None,
        locked=tuple((text_of(t.get("name")), _where(found)) for t, found in waiting if found),
        recorded=_recorded(content.get("collectives")),
        time=number_of(content.get("time")),
    )


def _frames(thread: dict[str, Any]) -> list[Frame]:
    """Return the frames of a thread, the innermost last."""
    found = []
    for frame in dicts(thread.get("frames")):
        line = frame.get("line")
        if not isinstance(line, int) or not 0 <= line < MAX_LINE:
            line = 0
        found.append(Frame(text_of(frame.get("file")), text_of(frame.get("function")), line))
    return found


def _in_lock(thread: dict[str, Any]) -> bool:
    """Return whether the innermost frame is the user's own and waits for a lock."""
    frames = dicts(thread.get("frames"))
    return bool(
        frames
        and frames[-1].get("calls") in _LOCK_CALLS
        and not _NOT_OWN.search(text_of(frames[-1].get("file")))
    )


def _collective(frames: list[Frame]) -> str | None:
    for frame in reversed(frames):
        if _TORCH_DISTRIBUTED.search(frame.file) and _COLLECTIVE.fullmatch(frame.function):
            return frame.function
    return None


def _waits_for(frames: list[Frame]) -> str | None:
    own = [i for i, frame in enumerate(frames) if not _NOT_OWN.search(frame.file)]
    for frame in frames[own[-1] + 1 :] if own else frames:
        for file, functions, thing in _WAITS:
            if re.search(file + "$", frame.file) and re.fullmatch(functions, frame.function):
                return thing
    return None


def _where(frames: list[Frame]) -> str:
    """Return the innermost frame outside torch and the standard library, else the innermost."""
    own = [frame for frame in frames if not _NOT_OWN.search(frame.file)]
    file, function, line = (own or frames)[-1]
    name = re.split(r"[/\\]", file)[-1]
    return f"{function} ({name}:{line})"


def _recorded(collectives: Any) -> tuple[RecordedCollective, ...]:
    """Return the collectives of whole groups, without those between two ranks."""
    found = []
    for entry in dicts(collectives):
        sequence = entry.get("sequence")
        if isinstance(sequence, int) and entry.get("p2p") is not True:
            name = text_of(entry.get("name")).rpartition(":")[2]
            group, waits = text_of(entry.get("process_group")), entry.get("state") != "completed"
            time = number_of(entry.get("time"))
            found.append(RecordedCollective(group, sequence, name, waits, time))
    return tuple(found)


# Ranks of a running training seldom wait this long.
WAITS_S = 2.0
_UNREAD = "could not be read"
# Words in the daemon's reason for missing stacks, and the state of the rank that follows.
_FATES = (
    ("process is stopped", "stopped"), ("process died", "dead"),
    ("process ended", "gone"), ("process is gone", "gone"),
)  # fmt: skip
_RANK = re.compile(r"\brank \d+")


class _Found(NamedTuple):
    """A kind of finding, its ranks, and its sentence; sure: the frames themselves show it."""

    kind: str
    ranks: list[int]
    sentence: str
    sure: bool = True


def diagnose_stacks(
    files: Sequence[TraceSource],
    missing: Mapping[int, str] | None = None,
    nodes: Mapping[int, str] | None = None,
    front_end: int | None = None,
) -> dict[str, Any]:
    """Return the JSON of a diagnosis (schema 1) whose summary names the waiting and late ranks.

    missing: ranks without a file, and why. A damaged file with a rank in its name counts as
    missing, too. nodes: the nodes of ranks, to be named. front_end: the process of an inference
    server that makes its latencies longer. Raises TraceError if no file is usable.
    """
    stacks: dict[int, RankStack] = {}
    lost = {
        rank: next((fate for words, fate in _FATES if words in why), _UNREAD)
        for rank, why in (missing or {}).items()
    }
    trouble: list[str] = []
    for path in files:
        try:
            stack = read_stack(path)
        except TraceError as error:
            trouble.append(str(error))
            named = rank_in_name(path.name)
            lost |= {} if named is None else {named: _UNREAD}
        else:
            stacks[stack.rank] = stack
    if not stacks:
        raise TraceError(trouble[0] if trouble else "no stacks file was given")
    if front_end is not None and front_end in stacks:
        found = _blocked_front_end(stacks[front_end])
    else:
        found = _find(
            [stacks[rank] for rank in sorted(stacks)],
            {rank: fate for rank, fate in sorted(lost.items()) if rank not in stacks},
        )
    placed = {f"rank {rank}": f" on {node}" for rank, node in (nodes or {}).items() if node}
    sentence = _RANK.sub(lambda rank: rank[0] + placed.get(rank[0], ""), found.sentence)
    rank = found.ranks[0] if len(found.ranks) == 1 else None
    node = None if rank is None else (nodes or {}).get(rank)
    confidence: Confidence = "high" if found.sure else "medium"
    text = advice(found.kind)
    return untimed_json([finding_json(found.kind, rank, node, confidence, [sentence], text)])


def _blocked_front_end(stack: RankStack) -> _Found:
    """Name the line of the event loop's thread; a sample may also miss what blocks it."""
    sentence = f"{_whereabouts([stack])}: meanwhile its event loop handles no request and no token"
    return _Found("blocked_front_end", [stack.rank], sentence, sure=False)


def _find(stacks: list[RankStack], lost: dict[int, str]) -> _Found:
    """Find the state of the job; ``lost`` has the ranks without a stack and their state."""
    waiting = [s for s in stacks if s.collective and not s.silent]
    busy = [s for s in stacks if s not in waiting]
    behind = _behind(stacks)
    if waiting:
        return _waiting_for(waiting, busy, lost, behind)
    backward = [s for s in stacks if s.in_backward and not s.silent]
    others = [s for s in busy if s not in backward]
    if backward and (others or lost):
        verb = "is" if len(backward) == 1 else "are"
        return _late(
            others,
            lost,
            f"{_ranks([s.rank for s in backward])} {verb} in backward, where ranks wait for each "
            f"other's gradients: probably for {_culprits(others, lost)}{behind[1]}",
            sure=False,
        )
    blocked = [s.rank for s in stacks if s.waits_for or s.silent]
    lead = "" if blocked else "no rank waits in a collective: "
    fates = grouped(lost, lost.__getitem__)
    unread = "".join(f"; {_ranks(of)} {_is(of, fate)}" for fate, of in fates.items())
    sentence = f"{lead}{_whereabouts(stacks)}{unread}{behind[1]}"
    stopped = _stopped(stacks, lost)
    if stopped or not behind[0]:
        kind = "stopped_rank" if stopped else "blocked_rank" if blocked else "no_rank_waits"
        return _Found(kind, stopped or blocked, sentence, sure=bool(stopped or blocked))
    return _Found("late_rank", behind[0], sentence)


def _waiting_for(
    waiting: list[RankStack],
    busy: list[RankStack],
    lost: dict[int, str],
    behind: tuple[list[int], str],
) -> _Found:
    names = sorted({s.collective for s in waiting if s.collective})
    verb = "waits" if len(waiting) == 1 else "wait"
    text = f"{_ranks([s.rank for s in waiting])} {verb} in {' and '.join(names)}"
    if busy or lost:
        return _late(busy, lost, f"{text} for {_culprits(busy, lost)}{behind[1]}")
    if behind[0]:
        return _Found("late_rank", behind[0], text + behind[1])
    if len(names) > 1:
        text += f": they are in different collectives ({_whereabouts(waiting)})"
        return _Found("mismatched_collectives", [], text)
    text += " and none is missing: the collective itself hangs, or a rank is elsewhere"
    return _Found("stuck_collective", [], text)


def _late(busy: list[RankStack], lost: dict[int, str], sentence: str, sure: bool = True) -> _Found:
    """Name the ranks that the others wait for, or only the stopped and dead ones among them."""
    stopped = _stopped(busy, lost)
    if stopped:
        return _Found("stopped_rank", stopped, sentence, sure)
    return _Found("late_rank", [s.rank for s in busy] + list(lost), sentence, sure)


def _stopped(stacks: list[RankStack], lost: dict[int, str]) -> list[int]:
    silent = [s.rank for s in stacks if s.silent == STOPPED]
    return silent + [rank for rank, fate in lost.items() if fate != _UNREAD]


def _culprits(busy: list[RankStack], lost: dict[int, str]) -> str:
    """Return a clause on the ranks that are waited for, grouped by their state."""
    clauses: dict[str, list[int]] = {}
    for stack in busy:
        does = _predicate(stack)
        clauses.setdefault(f", which {does}" if does else "", []).append(stack.rank)
    fates = grouped(lost, lost.__getitem__)
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
    """Return a clause on the rank if more than its line is known."""
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
    return listed([f"rank {s.rank} {_predicate(s) or 'is in ' + s.where}" for s in stacks])


def _behind(stacks: list[RankStack]) -> tuple[list[int], str]:
    """Return the ranks that never entered a collective in which a peer waits, and a clause.

    The stacks of a running job are of different moments, so a newer collective alone shows nothing
    about ranks that have not reached it.
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
            return behind, f"; {_ranks(behind)} never entered {missed} #{last + 1}"
    return [], ""


def _has_waited(
    peer: RankStack, group: str, last: int, stacks: list[RankStack], behind: list[int]
) -> bool:
    """Return whether it was in a later collective before the ranks behind were sampled."""
    seen = min((s.time for s in stacks if s.rank in behind and s.time is not None), default=None)
    return any(
        entry.group == group
        and entry.sequence > last
        and entry.waits
        and (seen is None or entry.time is None or entry.time <= seen - WAITS_S)
        for entry in peer.recorded
    )


def _is(ranks: list[int], fate: str) -> str:
    if fate == _UNREAD:
        return fate
    return f"{'is' if len(ranks) == 1 else 'are'} {fate}"


def _ranks(ranks: list[int]) -> str:
    """Return ``rank 3`` or ``ranks 1-3 and 7``."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    texts = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    listed = texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} and {texts[-1]}"
    return f"rank {listed}" if len(ranks) == 1 else f"ranks {listed}"
