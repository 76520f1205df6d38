"""Keeps traces small enough to be fixtures: whole steps, as many as fit."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

MAX_BYTES = 1_000_000


def keep(trace: Path, target: Path, max_bytes: int = MAX_BYTES) -> dict[str, Any]:
    """Writes ``target`` with the first steps of ``trace`` that fit into ``max_bytes`` compressed.

    Raises ValueError when not even one step fits, OSError.
    """
    with gzip.open(trace, "rt", encoding="utf-8") as file:
        document = json.load(file)
    events = document["traceEvents"]
    ends = sorted(
        event["ts"] + event["dur"]
        for event in events
        if event.get("cat") == "user_annotation" and event["name"].startswith("ProfilerStep#")
    )
    for steps in range(len(ends), 0, -1):
        # Metadata has no time.
        kept = [event for event in events if event.get("ts", 0) <= ends[steps - 1]]
        content = gzip.compress(json.dumps({**document, "traceEvents": kept}).encode(), mtime=0)
        if len(content) <= max_bytes:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
            return {"steps": steps, "of": len(ends), "bytes": len(content), "events": len(kept)}
    raise ValueError(f"{trace.name} has no step of at most {max_bytes} bytes compressed")
