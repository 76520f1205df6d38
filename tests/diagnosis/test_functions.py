"""Results of functions of the diagnosis, as a golden file."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests import expressions
from tests.conftest import Cases
from tests.diagnosis import captures, traces
from tests.diagnosis.timeline import Timeline
from warpwatch_diagnosis.measures.measures import Measures

MODULES = {
    "": "gc gzip json",
    "warpwatch_diagnosis": "__main__ alignment before_after diagnosis findings intervals rules "
    "memory_growth stacks words",
    "warpwatch_diagnosis.measures": "code_lines cpu_time gpu_time gpu_work host_events idle "
    "iterations measures operators reduction replay roofline runtime_calls steps",
    "warpwatch_diagnosis.report": "drawing handover html text",
    "warpwatch_diagnosis.rules": "base communication_bound host_activities host_bound "
    "memory_bound pipeline serving slower_compute straggler",
    "warpwatch_diagnosis.trace": "events files reader",
}
# A rank with only the fields that a function reads, and what Measures derives from them.
DERIVED = {name: one for name, one in vars(Measures).items() if callable(one) or "fget" in dir(one)}
Rank = type("Rank", (SimpleNamespace,), {k: v for k, v in DERIVED.items() if k[:2] != "__"})


def told(*ranks: traces.TraceFile, **known: Any) -> list[Any]:
    """Return the verdict, its summary, and the texts and numbers of its findings."""
    found = captures.diagnosed(Path(), *ranks, **known).to_json()
    return [found["verdict"], found["summary"], *(list(f.values()) for f in found["findings"])]


def timed(*calls: tuple[Any, ...], **known: Any) -> Measures:
    """Return the measures of a timeline on which methods with arguments were called."""
    timeline = Timeline(**known)
    for name, *arguments in calls:
        getattr(timeline, name)(*arguments)
    return timeline.measured()


def test_functions_return_the_golden_values(cases: Cases) -> None:
    known = {"Rank": Rank, "told": told, "timed": timed, **vars(captures), **vars(traces)}
    expressions.check(cases, "diagnosis/functions.txt", MODULES, known)
