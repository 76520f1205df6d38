"""What the shim adds to real programs of 1 to 4 ms a step, with its calls and under `run`.

A process a program and way, in which turns with and without the shim alternate. So both lie in the
same memory, and what other processes do to the caches hits both; the training thread's own
processor time leaves out where it waited for a core.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import tempfile
from typing import Any

from benchmarks.limits import at_least, at_most
from benchmarks.processes import answer_of, clean_environment, is_quick

PROGRAMS = ("dqn", "vae", "gpt")
MAX_US = {"calls": 10.0, "run": 20.0}
# Of a step's time, in phases.
MIN_NAMED = 0.85
# Where a process lies in memory moves a figure by several µs.
ROUNDS = 5
TIMEOUT_S = 600.0


def measure() -> dict[str, Any]:
    """Raises CannotMeasure."""
    found: dict[tuple[str, str], list[dict[str, float]]] = {}
    for _ in range(1 if is_quick() else ROUNDS):
        for name, way in itertools.product(PROGRAMS, MAX_US):
            found.setdefault((name, way), []).append(_in_a_process(name, way))
    rows: dict[str, Any] = {}
    limits = []
    for (name, way), rounds in found.items():
        added_us = [one["added_cpu_us"] for one in rounds]
        row = {figure: statistics.median(one[figure] for one in rounds) for figure in rounds[0]}
        rows[f"{way}_{name}"] = row | {"added_cpu_us_range": [min(added_us), max(added_us)]}
        what = f"{way}, {name}: µs of the processor added to a step"
        limits.append(at_most(what, row["added_cpu_us"], MAX_US[way]))
        limits.append(
            at_least(f"{way}, {name}: share of a step in phases", row["named"], MIN_NAMED)
        )
    return {"programs": rows, "limits": limits}


def _in_a_process(name: str, way: str) -> dict[str, float]:
    run = ["-m", "warpwatch", "run", "--", sys.executable] if way == "run" else []
    arguments = [*run, "-m", "benchmarks.program_loops", name, way]
    with tempfile.TemporaryDirectory() as folder:
        environment = {**clean_environment(), "WARPWATCH_DIR": folder}
        found: dict[str, float] = answer_of(f"{way} {name}", arguments, environment, TIMEOUT_S)
    return found
