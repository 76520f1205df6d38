"""Measures what a diagnosis costs, compared with Holistic Trace Analysis on the same traces.

    python -m benchmarks.diagnosis warpwatch|hta FILE…
    python -m benchmarks.diagnosis merge FOLDER

run one diagnosis in a process of their own and print its cost as JSON. The tools take turns, so
that both see the same machine; figures are medians of processor time. The traces are synthetic
(``diagnosis_traces.py``).
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import logging
import resource
import statistics
import sys
import tempfile
import time
import warnings
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.diagnosis_traces import write_trace
from benchmarks.processes import CannotMeasure, at_most, clean_environment, is_quick, output_of

OURS, PEER = "warpwatch", "hta"
DISTRIBUTION = "HolisticTraceAnalysis"
# The number of ranks and the events in the file of each.
CASES = {"one_rank": (1, 1_000_000), "five_ranks": (5, 200_000)}
TURNS = 3
TIMEOUT_S = 900.0
MAX_TIME_RATIO = 0.333
MAX_MEMORY_RATIO = 1 / 2
MAX_CPU_S = 20.0
MAX_PEAK_MIB = 667.6

# A fleet's capture. A few distinct reductions stand for all ranks.
RANKS, NODES, DISTINCT = 64, 8, 4
# Five steps of a model with 3,600 kernels each: as large as the real traces that we have.
EVENTS = 144_000
MAX_MERGE_S = 10.0
MAX_MERGE_PEAK_MB = 500.0


def measure() -> dict[str, object]:
    """Measure both tools, or only ours if the other is not installed. Raises CannotMeasure."""
    scale, turns = (10, 1) if is_quick() else (1, TURNS)
    missing = None if importlib.util.find_spec("hta") else f"{DISTRIBUTION} is not installed"
    tools = [OURS] if missing else [OURS, PEER]
    cases = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, (ranks, events) in CASES.items():
            files = _write_case(Path(folder) / name, ranks, events // scale)
            cases[name] = _measure_case(files, tools, turns) | {"events": ranks * events // scale}
    return {
        "turns": turns,
        "hta": missing or metadata.version(DISTRIBUTION),
        "cases": cases,
        "limits": [row for name, case in cases.items() for row in _limits(name, case)],
    }


def _write_case(folder: Path, ranks: int, events: int) -> list[Path]:
    """Write several ranks compressed, as captures are; a single rank as plain JSON."""
    folder.mkdir()
    # A single trace is one rank of two, so that it has collectives.
    suffix, world = (".json.gz", ranks) if ranks > 1 else (".json", 2)
    paths = [folder / f"rank{rank}{suffix}" for rank in range(ranks)]
    return [write_trace(path, events, rank, world) for rank, path in enumerate(paths)]


def _measure_case(files: list[Path], tools: list[str], turns: int) -> dict[str, Any]:
    """Return medians by tool, their ratio, and the numbers that both give for the first rank."""
    runs: dict[str, list[dict[str, Any]]] = {tool: [] for tool in tools}
    # Without this, HTA rounds kernels to whole µs, which makes a tenth of short ones idle time.
    environment = clean_environment() | {"HTA_DISABLE_NS_ROUNDING": "1"}
    for _ in range(turns):
        for tool, done in runs.items():
            arguments = ["-m", "benchmarks.diagnosis", tool, *map(str, files)]
            done.append(output_of(tool, arguments, environment, TIMEOUT_S))
    costs = {tool: _medians([r["cost"] for r in done]) for tool, done in runs.items()}
    case: dict[str, Any] = {
        tool: cost | {"numbers": runs[tool][0]["numbers"]} for tool, cost in costs.items()
    }
    if PEER in costs:
        case["ratio"] = {
            key: round(costs[OURS][key] / costs[PEER][key], 3) for key in ("cpu_s", "peak_mib")
        }
    return case


def _medians(costs: list[dict[str, float]]) -> dict[str, float]:
    return {key: round(statistics.median(cost[key] for cost in costs), 2) for key in costs[0]}


def _limits(name: str, case: dict[str, Any]) -> list[dict[str, Any]]:
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


def measure_merge() -> dict[str, object]:
    """Measure a fleet's diagnosis of 64 reductions, as the fleet runs it. Raises CannotMeasure."""
    from warpwatch_diagnosis.measures.reduction import MAX_BYTES

    events = EVENTS // 10 if is_quick() else EVENTS
    with tempfile.TemporaryDirectory() as folder:
        sizes = _write_reductions(Path(folder), events)
        cost = output_of("the merge", ["-m", "benchmarks.diagnosis", "merge", folder])
    return {
        "ranks": RANKS,
        "events_a_rank": events,
        **cost,
        "limits": [
            at_most("reduction bytes", max(sizes), MAX_BYTES),
            at_most("processor seconds", cost["cpu_s"], MAX_MERGE_S),
            at_most("peak MB", cost["peak_mb"], MAX_MERGE_PEAK_MB),
        ],
    }


def _write_reductions(folder: Path, events: int) -> list[int]:
    """Write a reduction per rank; return their sizes."""
    from warpwatch_diagnosis.measures.measures import measure as measured
    from warpwatch_diagnosis.measures.reduction import pack
    from warpwatch_diagnosis.trace.reader import read_trace

    traces = (write_trace(folder / "trace.json.gz", events, n, RANKS) for n in range(DISTINCT))
    measures = [measured(read_trace(trace)) for trace in traces]
    sizes = []
    for rank in range(RANKS):
        one = replace(measures[rank % DISTINCT], rank=rank, file=f"rank{rank}.pt.trace.json.gz")
        sizes.append((folder / f"rank{rank}.reduction.gz").write_bytes(pack(one)))
    return sizes


# --- in a process of its own ---


def _merge(folder: Path) -> dict[str, Any]:
    """Diagnose in a sandboxed child as the fleet does; return that child's cost."""
    from warpwatch_capturing import child

    names = [f"rank{rank}.reduction.gz" for rank in range(RANKS)]
    nodes = {rank: f"gpu-{rank * NODES // RANKS}" for rank in range(RANKS)}
    begun = time.monotonic()
    outcome = child.diagnose("torch", folder, names, {}, nodes=nodes)
    wall_s = time.monotonic() - begun
    if outcome != "ok":
        raise CannotMeasure(outcome)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {
        "wall_s": round(wall_s, 2),
        "cpu_s": round(used.ru_utime + used.ru_stime, 2),
        "peak_mb": round(used.ru_maxrss * 1024 / 1e6, 1),
        "diagnosis_bytes": (folder / "diagnosis.json").stat().st_size,
        "report_bytes": (folder / "report.html").stat().st_size,
        "verdict": json.loads((folder / "diagnosis.json").read_text())["verdict"],
    }


def _warpwatch(files: list[str]) -> dict[str, Any]:
    from warpwatch_diagnosis.__main__ import main

    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        main(["--json", *files])
    trace = json.loads(output.getvalue())["traces"][0]
    return {key: trace["time"][key] for key in ("idle_ratio", "compute_ratio", "overlap_ratio")}


def _hta(files: list[str]) -> dict[str, Any]:
    """Run the parts of Holistic Trace Analysis that our diagnosis has as well."""
    from hta.trace_analysis import TraceAnalysis

    traces = dict(enumerate(files))
    analysis = TraceAnalysis(trace_files=traces, include_last_profiler_step=True)
    ranks = list(range(len(files)))
    times = analysis.get_temporal_breakdown(visualize=False).iloc[0]
    overlap = analysis.get_comm_comp_overlap(visualize=False).iloc[0]["comp_comm_overlap_pctg"]
    analysis.get_gpu_kernel_breakdown(visualize=False)
    analysis.get_idle_time_breakdown(ranks=ranks, visualize=False)
    analysis.get_cuda_kernel_launch_stats(ranks=ranks, visualize=False)
    analysis.get_queue_length_summary(ranks=ranks)
    return {
        "idle_ratio": round(float(times["idle_time_pctg"]) / 100, 4),
        "compute_ratio": round(float(times["compute_time_pctg"]) / 100, 4),
        "overlap_ratio": None if overlap != overlap else round(float(overlap) / 100, 4),
    }


def _diagnose(tool: str, files: list[str]) -> dict[str, Any]:
    """Return the cost since the process started, and numbers of the first rank to compare."""
    begin = time.monotonic()
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    with contextlib.redirect_stdout(sys.stderr):
        numbers = {OURS: _warpwatch, PEER: _hta}[tool](files)
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    own_kib = int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])
    cost = {
        "cpu_s": time.process_time() + children.ru_utime + children.ru_stime,
        "wall_s": time.monotonic() - begin,
        # The largest process, this one or a child.
        "peak_mib": max(own_kib, children.ru_maxrss) / 1024,
    }
    return {"cost": cost, "numbers": numbers}


if __name__ == "__main__":
    tool, *arguments = sys.argv[1:]
    print(json.dumps(_merge(Path(*arguments)) if tool == "merge" else _diagnose(tool, arguments)))
