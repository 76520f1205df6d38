"""Finds the line of a program that keeps memory step after step, from the ranks' memory files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from warpwatch_diagnosis.diagnosis import INCONCLUSIVE, untimed_json
from warpwatch_diagnosis.rules.base import Confidence, advice, finding_json
from warpwatch_diagnosis.trace.files import (
    TraceError,
    TraceSource,
    dicts,
    load_json,
    number_of,
    text_of,
)

GROWS = "memory_growth"
# Less is noise: lists that are enlarged now and then, strings that are interned.
MIN_BYTES = 4096
# The process itself grows in pieces that the allocator hands out.
MIN_PROCESS_BYTES = 256 * 1024
# Objects that explain less than this of the process's growth are not its cause.
MIN_EXPLAINED_SHARE = 0.3
MAX_EVIDENCE = 4


def diagnose_memory(
    files: Sequence[TraceSource], nodes: Mapping[int, str] | None = None
) -> dict[str, Any]:
    """Return the JSON of a diagnosis (schema 1) of the ranks whose memory grows, the fastest first.

    ``nodes``: the nodes of the ranks, to be named. Raises TraceError for an unusable file.
    """
    ranks = [_read(path, nodes or {}) for path in files]
    if not ranks:
        raise TraceError("no memory file was given")
    ranks.sort(key=lambda found: -found[0])
    growing = [finding for per_step, finding in ranks if per_step > 0]
    return untimed_json(growing or [ranks[0][1]])


def _read(path: TraceSource, nodes: Mapping[int, str]) -> tuple[float, dict[str, Any]]:
    """Return the growth of a rank in bytes per step, 0 without, and the finding."""
    content = load_json(path)
    if not isinstance(content, dict):
        raise TraceError(f"{path}: no memory file: it is not a JSON object")
    rank = content.get("rank")
    rank = rank if isinstance(rank, int) and not isinstance(rank, bool) and rank >= 0 else None
    name, host = "memory" if rank is None else f"rank {rank}", content.get("host")
    per_step, confidence, text, evidence = _growth(name, host if isinstance(host, dict) else {})
    if not per_step:
        evidence += _held(content)
    kind, node = GROWS if per_step > 0 else INCONCLUSIVE, None if rank is None else nodes.get(rank)
    return per_step, finding_json(kind, rank, node, confidence, evidence, text)


def _growth(name: str, host: dict[str, Any]) -> tuple[float, Confidence, str, tuple[str, ...]]:
    """Return bytes per step, confidence, advice, and evidence, the largest reason first."""
    steps, process = _number(host, "steps"), _number(host, "bytes_per_step")
    types = [one for one in dicts(host.get("types")) if _number(one, "bytes_per_step") > 0]
    lines, graph = dicts(host.get("lines")), host.get("graph")
    known = sorted(lines + types, key=lambda one: -_number(one, "bytes_per_step"))
    evidence = tuple(map(_sentence, known[:MAX_EVIDENCE]))
    most = _number(known[0], "bytes_per_step") if known else 0.0
    measured = f"the process grew by {_sized(process)} a step in {steps:.0f} steps"
    if most >= MIN_BYTES and most >= MIN_EXPLAINED_SHARE * process:
        # The objects of a line have a type if one grows there.
        same = [one for one in types if one.get("line") == known[0].get("line")]
        largest = _sentence({**same[0], **known[0]} if same else known[0])
        text = advice(GROWS, "no_collector" if host.get("collects") is False else "objects")
        if isinstance(graph, dict):
            text = f"{advice(GROWS, 'graph')} {text}"
        found = (f"{name} keeps {largest}", *evidence[1:], measured)
        return most, "high", text, found
    if isinstance(graph, dict):
        where = "" if graph.get("line") is None else f" (made in {text_of(graph['line'])})"
        reaches = f"whose autograd graph reaches back over all {steps:.0f} steps"
        found = (f"{name} keeps a tensor{where} {reaches}", *evidence, measured)
        return max(process, 1.0), "high", advice(GROWS, "graph"), found
    if process >= MIN_PROCESS_BYTES:
        reason = ", and no object of Python grows as fast"
        if host.get("types") is None:
            reason = ": its objects were too many to count"
        found = (f"{name} takes {_sized(process)} more each step{reason}", *evidence)
        return process, "medium", advice(GROWS, "native"), found
    nothing = f"{name}: nothing grew in the {steps:.0f} steps that were recorded"
    if most >= MIN_BYTES or process >= MIN_PROCESS_BYTES / 4:
        limit = _sized(MIN_PROCESS_BYTES)
        nothing = f"{name}: {measured}; less than {limit} may be chance"
    return 0.0, "low", advice(GROWS, "nothing"), (nothing, *evidence)


def _sentence(one: dict[str, Any]) -> str:
    """Return ``240 kB more each step: 1 torch.Tensor, allocated in train.py:41``."""
    kind, count, line = one.get("type"), _number(one, "count_per_step"), one.get("line")
    objects = "" if kind is None else f": {count:g} {text_of(kind)}"
    where = "" if line is None else f"{',' if objects else ':'} allocated in {text_of(line)}"
    return f"{_sized(_number(one, 'bytes_per_step'))} more each step{objects}{where}"


def _held(content: dict[str, Any]) -> tuple[str, ...]:
    """Return sentences on the memory that a device's allocator holds."""
    return tuple(
        f"the GPU's allocator holds {_sized(_number(one, 'bytes'))} in "
        f"{_number(one, 'blocks'):.0f} blocks of {text_of(one.get('line'))}"
        for one in dicts(content.get("lines"))[:MAX_EVIDENCE]
    )


def _number(fields: dict[str, Any], name: str) -> float:
    return number_of(fields.get(name)) or 0.0


def _sized(n_bytes: float) -> str:
    """Return decimal units with two digits: 240 kB."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(n_bytes) >= factor:
            return f"{float(f'{n_bytes / factor:.2g}'):g} {unit}"
    return f"{n_bytes:.0f} B"
