"""What a fleet's diagnosis of a capture over nodes costs: 64 reductions, as it reads them.

Times are processor time: what an idle core would take, in one thread. The reductions are of
synthetic traces (diagnosis_traces.py); few are made and stand for all ranks.
"""

from __future__ import annotations

import json
import resource
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.diagnosis_traces import write_trace
from benchmarks.limits import at_most
from benchmarks.processes import CannotMeasure, answer_of, is_quick
from warpwatch_capturing.children import child
from warpwatch_diagnosis.measures.measures import measure as measured
from warpwatch_diagnosis.measures.reduction import MAX_BYTES, pack
from warpwatch_diagnosis.trace.reader import read_trace

RANKS, NODES = 64, 8
DISTINCT = 4
# Five steps of a model with 3,600 kernels each: as large as the real traces that we have.
EVENTS = 144_000
MAX_S = 10.0
MAX_PEAK_MB = 500.0


def measure() -> dict[str, object]:
    """Raises CannotMeasure."""
    events = EVENTS // 10 if is_quick() else EVENTS
    with tempfile.TemporaryDirectory() as folder:
        sizes = _write(Path(folder), events)
        cost = answer_of("the merge", ["-m", "benchmarks.merge", folder])
    return {
        "ranks": RANKS,
        "events_a_rank": events,
        **cost,
        "limits": [
            at_most("reduction bytes", max(sizes), MAX_BYTES),
            at_most("processor seconds", cost["cpu_s"], MAX_S),
            at_most("peak MB", cost["peak_mb"], MAX_PEAK_MB),
        ],
    }


def _write(folder: Path, events: int) -> list[int]:
    """Of each rank its reduction; their bytes."""
    measures = []
    for rank in range(DISTINCT):
        trace = write_trace(folder / "trace.json.gz", events, rank, RANKS)
        measures.append(measured(read_trace(trace)))
    sizes = []
    for rank in range(RANKS):
        one = replace(measures[rank % DISTINCT], rank=rank, file=f"rank{rank}.pt.trace.json.gz")
        sizes.append((folder / f"rank{rank}.reduction.gz").write_bytes(pack(one)))
    return sizes


def _merge(folder: Path) -> dict[str, Any]:
    """In a process of its own, as the fleet does it; that one's peak."""
    names = [f"rank{rank}.reduction.gz" for rank in range(RANKS)]
    nodes = {rank: f"gpu-{rank * NODES // RANKS}" for rank in range(RANKS)}
    begun = time.monotonic()
    said = child.diagnose("torch", folder, names, {}, nodes=nodes)
    wall_s = time.monotonic() - begun
    if said != "ok":
        raise CannotMeasure(said)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    report = (folder / "report.html").stat().st_size
    return {
        "wall_s": round(wall_s, 2),
        "cpu_s": round(used.ru_utime + used.ru_stime, 2),
        "peak_mb": round(used.ru_maxrss * 1024 / 1e6, 1),
        "diagnosis_bytes": (folder / "diagnosis.json").stat().st_size,
        "report_bytes": report,
        "verdict": json.loads((folder / "diagnosis.json").read_text())["verdict"],
    }


if __name__ == "__main__":
    print(json.dumps(_merge(Path(sys.argv[1]))))
