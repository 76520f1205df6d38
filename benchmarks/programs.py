"""Measures what the shim adds to training programs, with its calls and under `run`.

Each program and way is a process, in which turns with and without the shim alternate. So both have
the same memory layout, and other processes disturb both; the training thread's processor time
leaves out its waits for a core.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator
from typing import Any

from benchmarks.processes import at_least, at_most, is_quick, output_of, running_daemon

# The ways by program; ``alone`` has no shim and is what its memory is compared with.
WAYS: dict[str, tuple[str, ...]] = {
    "small": ("alone", "calls", "run"),
    "compiled": ("run",),
    "accumulated": ("run",),
    **dict.fromkeys(("dqn", "gpt"), ("calls", "run")),
}
MAX_US = {"calls": 10.0, "run": 20.0}
# The share of a step that is in phases; ``small`` is too short for it.
MIN_NAMED = 0.85
REAL_PROGRAMS = ("dqn", "gpt")
MAX_MEMORY_KIB = 4096.0
# The memory layout of a process shifts a figure by several µs.
ROUNDS = 5
TIMEOUT_S = 600.0

Row = dict[str, Any]


def measure() -> dict[str, Any]:
    """Return the figures. Raises CannotMeasure."""
    cases = [(name, way) for name, ways in WAYS.items() for way in ways]
    found: dict[tuple[str, str], list[dict[str, float]]] = {case: [] for case in cases}
    with running_daemon(sources={"nvml": {"enabled": False}}) as daemon:
        for _ in range(1 if is_quick() else ROUNDS):
            for case, rounds in found.items():
                rounds.append(_in_a_process(*case, daemon.training_environment))
    rows: dict[tuple[str, str], Row] = {}
    for case, rounds in found.items():
        row = {figure: statistics.median(one[figure] for one in rounds) for figure in rounds[0]}
        added_us = [one["added_cpu_us"] for one in rounds]
        rows[case] = row | {"added_cpu_us_range": [min(added_us), max(added_us)]}
    programs = {f"{way}_{name}": row for (name, way), row in rows.items()}
    return {"programs": programs, "limits": list(_limits(rows))}


def _limits(rows: dict[tuple[str, str], Row]) -> Iterator[dict[str, Any]]:
    alone_kib = rows["small", "alone"]["rss_kib"]
    for (name, way), row in rows.items():
        if way == "alone":
            continue
        what = f"{way}, {name}: µs of the processor added to a step"
        yield at_most(what, row["added_cpu_us"], MAX_US[way])
        if name in REAL_PROGRAMS:
            yield at_least(f"{way}, {name}: share of a step in phases", row["named"], MIN_NAMED)
        if name == "small":
            yield at_most(f"{way}: KiB a rank", row["rss_kib"] - alone_kib, MAX_MEMORY_KIB)


def _in_a_process(name: str, way: str, environment: dict[str, str]) -> dict[str, float]:
    run = ["-m", "warpwatch", "run", "--", sys.executable] if way == "run" else []
    arguments = [*run, "-m", "benchmarks.program_loops", name, way]
    figures: dict[str, float] = output_of(f"{way} {name}", arguments, environment, TIMEOUT_S)
    return figures
