"""Compares one reading of ours with two of nvidia-smi's, taken right before and after it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from benchmarks.gpu import nvidia_smi
from benchmarks.gpu.metric_table import FACTS, ROWS, Row
from benchmarks.gpu.nvidia_smi import Leaves

AGREE, BETWEEN, DIFFERS = "agree", "between", "differs"
OURS_ONLY, THEIRS_ONLY = "ours_only", "theirs_only"
# Not both sides have numbers: their words are unknown to the table.
NOT_COMPARABLE = "not_comparable"


def compare(ours: Mapping[str, float], before: Leaves, after: Leaves) -> dict[str, Any]:
    """Verdicts by series, and what only one side knows at all. ``ours`` by series without
    ``device_``."""
    rows = [_compare(row, ours.get(row.series), before, after) for row in ROWS]
    table = {row.series for row in ROWS}
    paths = {path for row in ROWS for path in row.paths} | {*FACTS.values(), "uuid"}
    return {
        "verdicts": dict(Counter(row["verdict"] for row in rows)),
        "rows": rows,
        "not_in_nvidia_smi": sorted(set(ours) - table),
        "only_in_nvidia_smi": sorted(
            path
            for path, text in after.items()
            if path not in paths and text not in nvidia_smi.ABSENT
        ),
    }


def compare_facts(ours: Mapping[str, str], theirs: Leaves) -> dict[str, Any]:
    """Texts that must be the same; only the verdicts, since some identify the machine."""
    return {
        label: _same(ours.get(label, ""), theirs.get(path, "")) for label, path in FACTS.items()
    }


def _same(ours: str, theirs: str) -> str:
    if theirs in nvidia_smi.ABSENT:
        return AGREE if not ours else OURS_ONLY
    return (AGREE if ours.lower() == theirs.lower() else DIFFERS) if ours else THEIRS_ONLY


def _compare(row: Row, ours: float | None, before: Leaves, after: Leaves) -> dict[str, Any]:
    path = next((path for path in row.paths if path in after), row.paths[0])
    texts = before.get(path), after.get(path)
    first, second = (_value(row, text) for text in texts)
    said = {"series": row.series, "path": path, "ours": ours, "theirs": texts}
    said["verdict"] = _verdict(row, ours, first, second, texts)
    return said


def _value(row: Row, text: str | None) -> float | None:
    if row.words:
        return dict(row.words).get((text or "").strip())
    number = nvidia_smi.number(text)
    return None if number is None else number * row.factor


def _verdict(
    row: Row,
    ours: float | None,
    first: float | None,
    second: float | None,
    texts: tuple[str | None, str | None],
) -> str:
    if first is None or second is None:
        words = [text for text in texts if text not in (*nvidia_smi.ABSENT, None)]
        if words and ours is not None:
            return NOT_COMPARABLE
        return OURS_ONLY if ours is not None else THEIRS_ONLY if words else AGREE
    if ours is None:
        return THEIRS_ONLY
    # What is written is rounded or cut off at its last digit.
    step = nvidia_smi.resolution(texts[1] or "") * abs(row.factor) * 1.001
    if min(abs(ours - first), abs(ours - second)) <= step:
        return AGREE
    low, high = min(first, second) - step, max(first, second) + step
    if low <= ours <= high:
        return BETWEEN
    within = not row.counter and low - row.moves <= ours <= high + row.moves
    return BETWEEN if within and row.moves else DIFFERS
