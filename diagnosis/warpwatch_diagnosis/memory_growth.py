"""Which line of a program keeps memory step after step, from the memory files of its ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from warpwatch_diagnosis.trace.files import (
    TraceError,
    TraceSource,
    dicts,
    load_json,
    number_of,
    text_of,
)
from warpwatch_diagnosis.verdict.conclusion import SCHEMA

GROWS = "memory_growth"
INCONCLUSIVE = "inconclusive"
# Less is noise: lists that are enlarged now and then, strings that are interned.
MIN_BYTES = 4096
# Growth of the process itself, which the allocator hands out in pieces.
MIN_PROCESS_BYTES = 256 * 1024
# Objects that explain less than this of the process's growth are not its cause.
MIN_SHARE = 0.3
MAX_EVIDENCE = 4

_OBJECTS = (
    "Find what keeps them: a list, dict or cache that each step adds to and nothing empties. Bound "
    "it (collections.deque(maxlen=…), functools.lru_cache(maxsize=…)) or keep numbers instead: "
    "loss.item(), tensor.detach().cpu()."
)
_GRAPH = (
    "Keep loss.item() or loss.detach() instead of the tensor: `total = total + loss` and "
    "`losses.append(loss)` keep the graph of every step."
)
_NO_COLLECTOR = (
    "Python's garbage collector is off: objects in cycles are never freed. Call gc.collect() every "
    "some hundred steps, or gc.enable()."
)
_NATIVE = (
    "It is no memory of Python: look at C and C++ extensions, and at fragmentation (start with "
    "MALLOC_ARENA_MAX=2). memray run --native or heaptrack name the function."
)
_NOTHING = (
    "Capture more steps, so that what leaks now and then is among them: "
    "warpwatch capture --kind memory --steps 100."
)


@dataclass(frozen=True, slots=True)
class RankGrowth:
    """What one rank's file says: its growth a step in bytes, and why, the largest first."""

    rank: int | None
    per_step: float
    sentence: str
    evidence: tuple[str, ...]
    advice: str
    confidence: Literal["high", "medium", "low"]

    @property
    def grows(self) -> bool:
        return self.per_step > 0


def diagnose_memory(
    files: Sequence[TraceSource], nodes: Mapping[int, str] | None = None
) -> dict[str, Any]:
    """Return the JSON of a diagnosis (schema 1) of the ranks whose memory grows, the fastest first.

    nodes: where ranks ran, to be named. Raises TraceError for a file that cannot be used.
    """
    ranks = sorted(map(read_growth, files), key=lambda rank: -rank.per_step)
    if not ranks:
        raise TraceError("no memory file was given")
    growing = [rank for rank in ranks if rank.grows]
    findings = [_finding(rank, nodes or {}) for rank in growing or ranks[:1]]
    return {
        "schema": SCHEMA,
        "traces": [],
        "findings": findings,
        "verdict": findings[0]["kind"],
        "summary": findings[0]["evidence"][0],
    }


def read_growth(path: TraceSource) -> RankGrowth:
    """Raises TraceError when it is no memory file."""
    content = load_json(path)
    if not isinstance(content, dict):
        raise TraceError(f"{path}: no memory file: it is no JSON object")
    rank = content.get("rank")
    rank = rank if isinstance(rank, int) and not isinstance(rank, bool) and rank >= 0 else None
    host = content.get("host")
    if not isinstance(host, dict):
        host = {}
    return _growth(rank, host, _held(content))


def _growth(rank: int | None, host: dict[str, Any], held: tuple[str, ...]) -> RankGrowth:
    who = "memory" if rank is None else f"rank {rank}"
    steps, process = _number(host, "steps"), _number(host, "bytes_per_step")
    types = [one for one in dicts(host.get("types")) if _number(one, "bytes_per_step") > 0]
    lines = dicts(host.get("lines"))
    known = sorted(lines + types, key=lambda one: -_number(one, "bytes_per_step"))
    evidence = tuple(map(_sentence, known[:MAX_EVIDENCE]))
    most = _number(known[0], "bytes_per_step") if known else 0.0
    measured = f"the process grew by {size(process)} a step in {steps:.0f} steps"
    graph = host.get("graph")
    if most >= MIN_BYTES and most >= MIN_SHARE * process:
        said = _sentence(_with_type(known[0], types))
        advice = _NO_COLLECTOR if host.get("collects") is False else _OBJECTS
        more = (*evidence[1:], measured)
        if isinstance(graph, dict):
            advice = f"{_GRAPH} {advice}"
        return RankGrowth(rank, most, f"{who} keeps {said}", more, advice, "high")
    if isinstance(graph, dict):
        where = "" if graph.get("line") is None else f" (made in {text_of(graph['line'])})"
        said = f"{who} keeps a tensor{where} whose autograd graph reaches back over all {steps:.0f}"
        more = (*evidence, measured)
        return RankGrowth(rank, max(process, 1.0), f"{said} steps", more, _GRAPH, "high")
    if process >= MIN_PROCESS_BYTES:
        said = f"{who} takes {size(process)} more each step, and no object of Python grows as fast"
        if host.get("types") is None:
            said = f"{who} takes {size(process)} more each step: its objects were too many to count"
        return RankGrowth(rank, process, said, evidence, _NATIVE, "medium")
    said = f"{who}: nothing grew in the {steps:.0f} steps that were recorded"
    return RankGrowth(rank, 0.0, said, (*evidence, *held), _NOTHING, "low")


def _with_type(largest: dict[str, Any], types: list[dict[str, Any]]) -> dict[str, Any]:
    """A line's objects have a type, if one grows there."""
    same = [one for one in types if one.get("line") == largest.get("line")]
    return {**same[0], **largest} if same else largest


def _sentence(one: dict[str, Any]) -> str:
    """``240 kB more each step: 1 torch.Tensor, allocated in train.py:41``."""
    kind, count, line = one.get("type"), _number(one, "count_per_step"), one.get("line")
    what = "" if kind is None else f": {count:g} {text_of(kind)}"
    where = "" if line is None else f"{',' if what else ':'} allocated in {text_of(line)}"
    return f"{size(_number(one, 'bytes_per_step'))} more each step{what}{where}"


def _held(content: dict[str, Any]) -> tuple[str, ...]:
    """What the allocator of the device holds, where there is one."""
    held = dicts(content.get("lines"))[:MAX_EVIDENCE]
    return tuple(
        f"the GPU's allocator holds {size(_number(one, 'bytes'))} in {_number(one, 'blocks'):.0f} "
        f"blocks of {text_of(one.get('line'))}"
        for one in held
    )


def _finding(rank: RankGrowth, nodes: Mapping[int, str]) -> dict[str, Any]:
    node = None if rank.rank is None else nodes.get(rank.rank)
    return {
        "kind": GROWS if rank.grows else INCONCLUSIVE,
        "rank": rank.rank,
        **({"node": node} if node else {}),
        "share": None,
        "recoverable_s": None,
        "confidence": rank.confidence,
        "evidence": [rank.sentence, *rank.evidence],
        "advice": rank.advice,
    }


def _number(fields: dict[str, Any], name: str) -> float:
    return number_of(fields.get(name)) or 0.0


def size(n_bytes: float) -> str:
    """Return decimal units with two digits: 240 kB."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(n_bytes) >= factor:
            return f"{float(f'{n_bytes / factor:.2g}'):g} {unit}"
    return f"{n_bytes:.0f} B"
