"""Keeps traces small enough to be fixtures: whole steps, as many as fit."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

MAX_BYTES = 1_000_000
_STEP = "ProfilerStep#"


def keep(trace: Path, target: Path, max_bytes: int = MAX_BYTES) -> dict[str, Any]:
    """Writes ``target`` with the first steps of ``trace`` that fit into ``max_bytes`` compressed.

    Raises ValueError when not even one step fits, OSError.
    """
    with gzip.open(trace, "rt", encoding="utf-8") as file:
        document = json.load(file)
    ends = sorted(
        event["ts"] + event["dur"]
        for event in document["traceEvents"]
        if event.get("ph") == "X"
        and event.get("name", "").startswith(_STEP)
        and event.get("cat") == "user_annotation"
    )
    for steps in range(len(ends), -1, -1):
        # Without steps: the trace as it is, or nothing.
        end = ends[steps - 1] if steps else float("-inf") if ends else float("inf")
        kept = [
            event for event in document["traceEvents"] if event.get("ts", 0) <= end or _meta(event)
        ]
        content = gzip.compress(json.dumps({**document, "traceEvents": kept}).encode(), mtime=0)
        if len(content) <= max_bytes and (steps or not ends):
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
            return {"steps": steps, "of": len(ends), "bytes": len(content), "events": len(kept)}
    raise ValueError(f"one step of {trace.name} is larger than {max_bytes} bytes compressed")


def _meta(event: dict[str, Any]) -> bool:
    return event.get("ph") == "M"
