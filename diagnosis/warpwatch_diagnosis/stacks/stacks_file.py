"""One rank's stacks: where its main thread is, and what it waits for there."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, NamedTuple

from warpwatch_diagnosis.trace.errors import TraceError
from warpwatch_diagnosis.trace.rank_file import (
    dicts,
    load_json,
    number_of,
    rank_in_name,
    text_of,
)
from warpwatch_diagnosis.trace.reader import TraceSource

MAX_LINE = 2**31
STOPPED = "stopped"
HOLDS_GIL = "holds the GIL"
_COLLECTIVE = re.compile(
    r"_?(all_?reduce|all_?gather|all_?to_?all|reduce_?scatter|reduce|broadcast|barrier|"
    r"monitored_barrier|gather|scatter|send|recv|isend|irecv|batch_isend_irecv)"
    r"(_object_list|_object|_into_tensor|_tensor|_base|_single|_coalesced|_multigpu)?"
)
_TORCH_DISTRIBUTED = re.compile(r"torch[/\\]distributed[/\\]")
# Python that torch or the standard library runs on the way says nothing of where it is.
_NOT_OWN = re.compile(
    r"[/\\]torch[/\\]|[/\\]python3\.\d+[/\\](?!site-packages|dist-packages)|<frozen "
)
_AUTOGRAD = re.compile(r"torch[/\\](autograd[/\\](graph|__init__)|_tensor)\.py$")
# (end of the file, functions, what such a frame waits for): the outermost such frame says it.
_WAITS = (
    (r"torch[/\\]utils[/\\]data[/\\]dataloader\.py", r"_(try_)?get_data|_next_data", "its data"),
    (r"[/\\]queue\.py", "get|put|join", "a queue"),
    (r"[/\\]threading\.py", "join|_join|_wait_for_tstate_lock", "a thread to end"),
    (r"[/\\]threading\.py", "wait|wait_for", "an event"),
    (r"[/\\]threading\.py", "acquire|__enter__", "a lock"),
    (r"[/\\](subprocess|popen_fork|popen_spawn_posix|process)\.py", "wait|join", "a process"),
)
# C functions that a frame can be in while it waits for a lock.
_LOCK_CALLS = ("acquire", "__enter__")


class Frame(NamedTuple):
    file: str
    function: str
    line: int


class RecordedCollective(NamedTuple):
    """A collective of the Flight Recorder: its number in its process group, and its name.

    waits: it was entered and is not completed. time: when it was entered, wall clock; None: not
    known.
    """

    group: str
    sequence: int
    name: str
    waits: bool
    time: float | None


@dataclass(frozen=True, slots=True)
class RankStack:
    """The thread that matters of one rank: its main thread, or the one that holds the GIL.

    thread: its name, where it is not the main thread. collective: the one that it is in.
    where: the user's own innermost frame. waits_for: what it waits for there, if that can be seen.
    silent: STOPPED or HOLDS_GIL for a process that could not answer. locked: the other threads
    that wait for a lock, (name, where). recorded: its newest collectives. time: when this was
    seen, wall clock; None: not known.
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
    """Raises TraceError when it is no stacks file."""
    content = load_json(path)
    rank = content.get("rank") if isinstance(content, dict) else None
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 0:
        raise TraceError(f"{path}: no stacks file: it has no rank")
    if rank_in_name(path) not in (None, rank):
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
    """Innermost last."""
    found = []
    for frame in dicts(thread.get("frames")):
        line = frame.get("line")
        if not isinstance(line, int) or not 0 <= line < MAX_LINE:
            line = 0
        found.append(Frame(text_of(frame.get("file")), text_of(frame.get("function")), line))
    return found


def _in_lock(thread: dict[str, Any]) -> bool:
    """Whether the innermost frame itself waits for a lock, and no library does so for it."""
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
    """The innermost frame outside torch and the standard library, else the innermost of all."""
    own = [frame for frame in frames if not _NOT_OWN.search(frame.file)]
    file, function, line = (own or frames)[-1]
    name = re.split(r"[/\\]", file)[-1]
    return f"{function} ({name}:{line})"


def _recorded(collectives: Any) -> tuple[RecordedCollective, ...]:
    """Collectives of all ranks of a group; what two ranks do between themselves is left out."""
    found = []
    for entry in dicts(collectives):
        sequence = entry.get("sequence")
        if isinstance(sequence, int) and entry.get("p2p") is not True:
            name = text_of(entry.get("name")).rpartition(":")[2]
            group, waits = text_of(entry.get("process_group")), entry.get("state") != "completed"
            time = number_of(entry.get("time"))
            found.append(RecordedCollective(group, sequence, name, waits, time))
    return tuple(found)
