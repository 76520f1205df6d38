"""Measures what a diagnosis costs, compared with Holistic Trace Analysis on the same traces.

    python -m benchmarks.diagnosis warpwatch|hta FILE…
    python -m benchmarks.diagnosis merge FOLDER

run one diagnosis in a process of their own and print its cost as JSON. The tools take turns, so
that both see the same machine; figures are medians of processor time. The traces are synthetic.
"""

from __future__ import annotations

import contextlib
import gzip
import importlib.util
import io
import itertools
import json
import logging
import random
import resource
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

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


# --- synthetic traces, laid out as PyTorch 2.x writes them ---

# 3 operators, 2 runtime calls, a kernel and the two ends of its arrow. Real traces of training on a
# GPU have 30 to 35 % operators, 15 to 20 % calls, 9 to 15 % GPU events, 25 to 35 % arrows.
EVENTS_PER_KERNEL = 8
STEPS = 5
HOST, TRAIN, BACKWARD = 2910249, 2910249, 2919752
ORIGIN_US = 4458676000000.0
COMPUTE_STREAM, NCCL_STREAM = 7, 40
_HEAD = """
{
  "schemaVersion": 1,
  "deviceProperties": [
    {
      "id": 0, "name": "NVIDIA A100-SXM4-80GB", "totalGlobalMem": 85000000000,
      "computeMajor": 8, "computeMinor": 0, "numSms": 108
    }
  ],
  "distributedInfo": {"backend": "nccl", "rank": RANK, "world_size": RANKS},
  "traceEvents": ["""
_TAIL = """
  ],
  "displayTimeUnit": "ms",
  "baseTimeNanoseconds": 1711964646000000000
}
"""
_OPERATORS = (("aten::linear", "aten::addmm"), ("aten::layer_norm", "aten::native_layer_norm"),
              ("aten::gelu_", "aten::gelu"), ("aten::add_", "aten::add"))  # fmt: skip
_KERNELS = (
    ("ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_32x5_tn", 60.0),
    ("void at::native::vectorized_layer_norm_kernel<c10::BFloat16, float>(int, float)", 20.0),
    ("void at::native::vectorized_elementwise_kernel<4, at::native::GeluKernel>(int)", 12.0),
    ("void at::native::vectorized_elementwise_kernel<4, at::native::AddFunctor<float> >(int)", 9.0),
)  # fmt: skip
_TYPES = '"Input type": ["c10::BFloat16", "c10::BFloat16"]'
_NCCL = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevComm*, unsigned long, ncclWork*)"
_LOADER = "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"


def write_trace(path: Path, events: int, rank: int = 0, ranks: int = 1) -> Path:
    """Write about ``events`` elements of ``traceEvents``; gzip if the name ends in ``.gz``.

    The trace shows data-parallel training. Each step fetches a batch, launches kernels from nested
    operators, all-reduces the gradients on a second stream and steps the optimizer. A kernel begins
    when its launch has arrived and its stream is free. The same arguments give the same file.
    """
    with gzip.open(path, "wt", 1) if path.suffix == ".gz" else path.open("w") as file:
        file.write(_HEAD.replace("RANKS", str(ranks)).replace("RANK", str(rank)))
        events_of_rank = _Rank(events // EVENTS_PER_KERNEL // STEPS, rank, ranks).events()
        file.write("\n")
        file.write(next(events_of_rank))
        file.writelines(f",\n{event}" for event in events_of_rank)
        file.write(_TAIL)
    return path


class _Rank:
    def __init__(self, kernels_per_step: int, rank: int, ranks: int) -> None:
        self._kernels = kernels_per_step
        self._ranks = ranks
        self._noise = random.Random(rank)
        self._now = ORIGIN_US
        self._free = {COMPUTE_STREAM: self._now, NCCL_STREAM: self._now}
        self._number = itertools.count(1)

    def events(self) -> Iterator[str]:
        for step in range(STEPS):
            begin = self._now
            yield self._annotation(_LOADER, begin, 150.0)
            self._now += 200.0
            for index in range(self._kernels):
                yield from self._launch(index)
            self._now = max(self._now, *self._free.values())
            yield self._annotation(f"ProfilerStep#{step + 10}", begin, self._now - begin)

    def _launch(self, index: int) -> Iterator[str]:
        choice = index % len(_KERNELS)
        outer, inner = _OPERATORS[choice]
        thread = TRAIN if index < self._kernels // 3 else BACKWARD
        took = self._noise.uniform(18.0, 26.0)
        dims = f'"Input Dims": [[{8 << choice}, 1024], [1024, {256 << choice}]], {_TYPES}'
        yield self._operator(outer, thread, self._now, took, dims)
        yield self._operator(inner, thread, self._now + 1.5, took - 3.0, dims)
        yield self._operator("aten::empty", thread, self._now + 3.0, 2.5, '"Input Dims": [[]]')
        yield self._call("cudaStreamIsCapturing", thread, self._now + 6.0, 0.75, next(self._number))
        communicates = self._ranks > 1 and index % 40 == 39
        name, us = (_NCCL, 900.0) if communicates else _KERNELS[choice]
        stream = NCCL_STREAM if communicates else COMPUTE_STREAM
        launched = self._now + 8.0
        begin = max(self._free[stream], launched + 9.0)
        length = us * self._noise.uniform(0.3, 0.5)
        self._free[stream] = begin + length
        self._now += took + 1.0
        yield from self._kernel(name, stream, thread, launched, begin, length)

    def _kernel(
        self, name: str, stream: int, thread: int, launched: float, begin: float, us: float
    ) -> Iterator[str]:
        number = next(self._number)
        yield self._call("cudaLaunchKernel", thread, launched, 5.125, number)
        yield self._arrow("s", number, HOST, thread, launched)
        arguments = f"""{number}, "queued": 0, "device": 0, "context": 1,
      "stream": {stream}, "correlation": {number}, "registers per thread": 96,
      "shared memory": 400, "blocks per SM": 4.740741, "warps per SM": 75.851852,
      "grid": [512, 1, 1], "block": [512, 1, 1], "est. achieved occupancy %": 75"""
        yield _span("kernel", name, 0, stream, begin, us, arguments)
        yield self._arrow("f", number, 0, stream, begin)

    def _call(self, name: str, thread: int, begin: float, us: float, number: int) -> str:
        arguments = f'{number}, "cbid": 211, "correlation": {number}'
        return _span("cuda_runtime", name, HOST, thread, begin, us, arguments)

    def _operator(self, name: str, thread: int, begin: float, us: float, more: str) -> str:
        number = next(self._number)
        arguments = f'{number}, "Record function id": 0, {more}, "Ev Idx": {number}'
        return _span("cpu_op", name, HOST, thread, begin, us, arguments)

    def _annotation(self, name: str, begin: float, us: float) -> str:
        arguments = f'{next(self._number)}, "Ev Idx": 0'
        return _span("user_annotation", name, HOST, TRAIN, begin, us, arguments)

    def _arrow(self, end: str, number: int, process: int, thread: int, at: float) -> str:
        closing = ', "bp": "e"' if end == "f" else ""
        return f"""  {{
    "ph": "{end}", "id": {number}, "pid": {process}, "tid": {thread}, "ts": {at:.3f},
    "cat": "ac2g", "name": "ac2g"{closing}
  }}"""


def _span(
    category: str, name: str, process: int, thread: int, begin: float, us: float, arguments: str
) -> str:
    """Return a complete event; ``arguments`` begin with the value of ``External id``."""
    return f"""  {{
    "ph": "X", "cat": "{category}", "name": "{name}", "pid": {process}, "tid": {thread},
    "ts": {begin:.3f}, "dur": {us:.3f},
    "args": {{
      "External id": {arguments}
    }}
  }}"""


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
