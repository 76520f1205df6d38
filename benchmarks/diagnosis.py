"""What a diagnosis costs, compared with Holistic Trace Analysis on the same synthetic traces.

Each run is a process of its own, in turns so that both see the same machine; figures are medians.
Times are processor time: what an idle core would take.
"""

from __future__ import annotations

import importlib.util
import statistics
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks import diagnosis_run
from benchmarks.diagnosis_traces import write_trace
from benchmarks.limits import at_most
from benchmarks.processes import answer_of, clean_environment, is_quick

OURS, PEER = "warpwatch", "hta"
DISTRIBUTION = "HolisticTraceAnalysis"
# By the number of ranks, each with a file of so many events.
CASES = {"one_rank": (1, 1_000_000), "five_ranks": (5, 200_000)}
TURNS = 3
TIMEOUT_S = 900.0

MAX_TIME_RATIO = 0.333
MAX_MEMORY_RATIO = 1 / 2
MAX_CPU_S = 20.0
MAX_PEAK_MIB = 667.6


def measure() -> dict[str, object]:
    """Raises CannotMeasure when ours fails; the other tool is measured if it is installed."""
    scale, turns = (10, 1) if is_quick() else (1, TURNS)
    missing = None if importlib.util.find_spec("hta") else f"{DISTRIBUTION} is not installed"
    tools = [OURS] if missing else [OURS, PEER]
    cases = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, (ranks, events) in CASES.items():
            files = write_case(Path(folder) / name, ranks, events // scale)
            cases[name] = measure_case(files, tools, turns) | {"events": ranks * events // scale}
    return {
        "turns": turns,
        "hta": missing or metadata.version(DISTRIBUTION),
        "cases": cases,
        "limits": [row for name, case in cases.items() for row in limits(name, case)],
    }


def write_case(folder: Path, ranks: int, events: int) -> list[Path]:
    """Several ranks as they are captured, compressed; a single one as plain JSON."""
    folder.mkdir()
    # A single trace is of one rank of two, so that it has collectives.
    suffix, world = (".json.gz", ranks) if ranks > 1 else (".json", 2)
    paths = [folder / f"rank{rank}{suffix}" for rank in range(ranks)]
    return [write_trace(path, events, rank, world) for rank, path in enumerate(paths)]


def measure_case(files: list[Path], tools: list[str], turns: int) -> dict[str, Any]:
    """Medians by tool, their ratio, and the numbers that both give for the first rank."""
    runs: dict[str, list[dict[str, Any]]] = {tool: [] for tool in tools}
    for _ in range(turns):
        for tool, done in runs.items():
            done.append(run(tool, files))
    costs = {tool: _medians([r["cost"] for r in done]) for tool, done in runs.items()}
    case: dict[str, Any] = {
        tool: cost | {"numbers": runs[tool][0]["numbers"]} for tool, cost in costs.items()
    }
    if PEER in costs:
        case["ratio"] = {
            key: round(costs[OURS][key] / costs[PEER][key], 3) for key in ("cpu_s", "peak_mib")
        }
    return case


def run(tool: str, files: list[Path]) -> Any:
    # Otherwise it rounds kernels to whole µs, which makes a tenth of short ones idle time.
    environment = clean_environment() | {"HTA_DISABLE_NS_ROUNDING": "1"}
    arguments = [diagnosis_run.__file__, tool, *map(str, files)]
    return answer_of(tool, arguments, environment, TIMEOUT_S)


def _medians(costs: list[dict[str, float]]) -> dict[str, float]:
    return {key: round(statistics.median(cost[key] for cost in costs), 2) for key in costs[0]}


def limits(name: str, case: dict[str, Any]) -> list[dict[str, Any]]:
    """One row a limit; those of ratios only if the other tool was measured."""
    ours, ratio = case[OURS], case.get("ratio")
    rows = [
        at_most(f"processor seconds, {name}", ours["cpu_s"], MAX_CPU_S),
        at_most(f"peak MiB, {name}", ours["peak_mib"], MAX_PEAK_MIB),
    ]
    if ratio:
        rows += [
            at_most(f"time by that of {PEER}, {name}", ratio["cpu_s"], MAX_TIME_RATIO),
            at_most(f"memory by that of {PEER}, {name}", ratio["peak_mib"], MAX_MEMORY_RATIO),
        ]
    return rows
