"""One diagnosis in a process of its own: ``diagnosis_run.py warpwatch|hta FILE…``, a rank each.

Writes JSON: the cost since the process began, and a few numbers of the first rank, to check that
both measure the same. Holistic Trace Analysis computes those of its numbers that ours has as well.
It rounds to whole µs unless HTA_DISABLE_NS_ROUNDING is set.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import resource
import sys
import time
import warnings
from pathlib import Path
from typing import Any


def warpwatch(files: list[str]) -> dict[str, Any]:
    from warpwatch_diagnosis.__main__ import main

    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        main(["--json", *files])
    trace = json.loads(output.getvalue())["traces"][0]
    known = ("idle_ratio", "compute_ratio", "overlap_ratio")
    return {key: trace["time"][key] for key in known}


def hta(files: list[str]) -> dict[str, Any]:
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


def peak_mib() -> float:
    """Resident memory of the largest process, this one or a child."""
    status = Path("/proc/self/status").read_text()
    own_kib = int(status.split("VmHWM:")[1].split()[0])
    return max(own_kib, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss) / 1024


def main() -> None:
    begin = time.monotonic()
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    with contextlib.redirect_stdout(sys.stderr):
        numbers = {"warpwatch": warpwatch, "hta": hta}[sys.argv[1]](sys.argv[2:])
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    cost = {
        "cpu_s": time.process_time() + children.ru_utime + children.ru_stime,
        "wall_s": time.monotonic() - begin,
        "peak_mib": peak_mib(),
    }
    print(json.dumps({"cost": cost, "numbers": numbers}))


if __name__ == "__main__":
    main()
