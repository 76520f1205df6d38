"""Multi-node runs: each agent sums up its own ranks, and the fleet joins these to one run."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import msgspec

from warpwatch_detection.runs import RunFigures
from warpwatch_telemetry.jobs import JobId, RunSummary

# Nodes that are named.
MAX_NAMED = 8
MAX_CAPTURES = 20
# The page asks every 2 s.
AGE_S = 5.0


class RunPart(NamedTuple):
    """One agent's summary of a run. encoded: a RunSummary as JSON, a fifth of its size in memory.

    run: its name in the fleet. ahead_s: by how much the fleet's clock is ahead of the agent's.
    """

    run: JobId
    node: str
    ahead_s: float
    encoded: bytes


RunParts = tuple[Iterable[RunPart], Mapping[JobId, Mapping[str, int]]]


class Runs:
    """Runs of all nodes, merged again once older than AGE_S. For any thread.

    read: returns the arguments of ``merged``.
    """

    def __init__(
        self, read: Callable[[], RunParts], monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._read = read
        self._monotonic = monotonic
        self._merged: list[RunSummary] = []
        self._at = -math.inf

    def all(self) -> list[RunSummary]:
        now = self._monotonic()
        if now - self._at > AGE_S:
            self._merged, self._at = merged(*self._read()), now
        return self._merged


def merged(parts: Iterable[RunPart], raised: Mapping[JobId, Mapping[str, int]]) -> list[RunSummary]:
    """Return the runs, oldest first. raised: the fleet's anomalies by kind."""
    runs: dict[JobId, list[RunSummary]] = {}
    for part in parts:
        summary = msgspec.json.decode(part.encoded, type=RunSummary)
        end = summary.end_time
        summary = replace(
            summary,
            **part.run.fields(),
            node=part.node,
            time=summary.time + part.ahead_s,
            first_time=summary.first_time + part.ahead_s,
            end_time=None if end is None else end + part.ahead_s,
        )
        runs.setdefault(part.run, []).append(summary)
    found = [_together(of_run, raised.get(run, {})) for run, of_run in runs.items()]
    return sorted(found, key=lambda run: run.first_time)


def _together(parts: Sequence[RunSummary], raised: Mapping[str, int]) -> RunSummary:
    parts = sorted(parts, key=lambda part: part.ranks[:1])
    figures = RunFigures(*parts)
    figures.anomalies.update(raised)
    ends = [part.end_time for part in parts]
    models = {part.gpu_model for part in parts if part.gpu_model}
    return replace(
        parts[0],
        **figures.fields(1)
        | {"tokens_per_s": _sum(part.tokens_per_s for part in parts)}
        | {"samples_per_s": _sum(part.samples_per_s for part in parts)},
        node=_names([part.node for part in parts]),
        time=max(part.time for part in parts),
        first_time=min(part.first_time for part in parts),
        end_time=None if None in ends else max(end for end in ends if end is not None),
        world_size=max(part.world_size for part in parts),
        ranks=tuple(sorted({rank for part in parts for rank in part.ranks})),
        gpu_model=", ".join(sorted(models)) or None,
        steps=max(part.steps for part in parts),
        energy_j=_sum(part.energy_j for part in parts),
        captures=tuple(sorted({one for part in parts for one in part.captures})[-MAX_CAPTURES:]),
        remote=next((part.remote for part in parts if part.remote), None),
    )


def _names(nodes: Sequence[str]) -> str:
    more = f" and {len(nodes) - MAX_NAMED} more" if len(nodes) > MAX_NAMED else ""
    return ", ".join(nodes[:MAX_NAMED]) + more


def _sum(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None
