"""Traces that are JSON but odd, read to the end: measures, verdict, reports."""

import copy
import json
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.diagnosis.trace.odd_traces import ANY_JSON, ARGUMENTS, ELEMENTS, ODD, verdict
from tests.diagnosis.traces import TraceFile, cpu_rank, rank_trace
from tests.fuzz.watch import Target, of_bytes

FIELDS = ["ph", "cat", "name", "ts", "dur", "pid", "tid", "args"]
CHANGES = st.lists(
    st.tuples(st.integers(0, 999), st.sampled_from(FIELDS + ARGUMENTS), ODD), max_size=12
)


def changed(events: list[dict[str, Any]], changes: list[tuple[int, str, Any]]) -> list[Any]:
    events = [event | {"args": dict(event["args"])} for event in events]
    for number, key, value in changes:
        event = events[number % len(events)]
        if isinstance(event["args"], dict) and key in ARGUMENTS:
            event["args"][key] = copy.deepcopy(value)
        elif key not in ARGUMENTS:
            # It may be changed itself, and hypothesis draws the same one again.
            event[key] = copy.deepcopy(value)
    return events


def target(folder: Path) -> Target:
    path = folder / "rank0.json"
    small = TraceFile(warpwatch={"gc_pauses_us": [[1, 1]]}, baseTimeNanoseconds=0)
    for begin in small.each_step():
        small.operator(begin, 3000)
        small.kernel(begin + 4000, 5000, launched_us=begin + 3990)
    originals = [small, cpu_rank(0, loading_us=900), rank_trace(0)]

    @settings(database=None)
    @given(
        original=st.sampled_from(originals),
        changes=CHANGES,
        more=st.lists(ELEMENTS | ANY_JSON, max_size=8),
        twice=st.booleans(),
    )
    def read(original: TraceFile, changes: Any, more: list[Any], twice: bool) -> None:
        events = changed(original.events, changes) + more
        path.write_text(json.dumps(original.head | {"traceEvents": events * (1 + twice)}))
        verdict(path)

    return of_bytes(read)
