"""Traces of which all steps have the same parts, and captures of some ranks, diagnosed.

Times are in µs from the start of the step.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.diagnosis.traces import TraceFile
from warpwatch_diagnosis.diagnosis import Diagnosis, diagnose

# Adds an event to the step that starts at the given µs.
Part = Callable[[TraceFile, float], None]


def loading(us: float, at: float = 0, kind: str = "SingleProcess", tid: int = 77) -> Part:
    name = f"enumerate(DataLoader)#_{kind}DataLoaderIter.__next__"
    return lambda trace, begin: trace.annotation(name, begin + at, us, tid)


def operator(at: float, us: float, name: str = "aten::mm") -> Part:
    return lambda trace, begin: trace.operator(begin + at, us, name)


def kernel(at: float, us: float, launched: float, name: str = "gemm", launch_us: float = 5) -> Part:
    return lambda trace, begin: trace.kernel(begin + at, us, begin + launched, name, launch_us)


def event(cat: str, name: str, at: float, us: float, tid: Any = 77, **arguments: Any) -> Part:
    return lambda trace, begin: trace.event(cat, name, begin + at, us, tid, **arguments)


def stepped(*parts: Part, steps: int = 4, **head: Any) -> TraceFile:
    trace = TraceFile(steps, **head)
    for begin in trace.each_step():
        for add in parts:
            add(trace, begin)
    return trace


def without_steps(trace: TraceFile) -> TraceFile:
    trace.events = [one for one in trace.events if not one["name"].startswith("ProfilerStep")]
    return trace


def written(folder: Path, *ranks: TraceFile, name: str = "rank") -> list[Path]:
    return [trace.write(folder / f"{name}{k}.json") for k, trace in enumerate(ranks)]


def diagnosed(folder: Path, *ranks: TraceFile, **options: Any) -> Diagnosis:
    return diagnose(written(folder, *ranks), **options)
