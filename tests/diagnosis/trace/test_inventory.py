"""What is counted while a trace streams by is what the diagnosis reads of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.diagnosis.traces import ORIGIN_US, STEP_US, TraceFile
from warpwatch_diagnosis.trace.inventory import take_inventory
from warpwatch_diagnosis.trace.reader import read_trace

FOLDER = Path(__file__).parents[4] / "shared" / "evaluation" / "traces"


def test_events_without_a_time_are_counted_apart_and_steps_with_theirs(tmp_path: Path) -> None:
    trace = TraceFile(steps=2, warpwatch={"rank": 3}, deviceProperties=[{"id": 0}])
    trace.operator(100, 50)
    trace.events += [
        trace.events[-1] | {"ts": 0},
        trace.events[-1] | {"ts": "5"},
        trace.events[-1] | {"dur": -1},
        {"ph": "s", "cat": "ac2g", "ts": 1},
        {"ph": "X", "cat": "new", "ts": 1, "dur": 1},
    ]
    found = take_inventory(trace.write(tmp_path / "trace.json.gz"))
    assert (found.listed, found.untimed, found.rank, found.sees_gpu) == (8, 3, 3, True)
    assert found.counts == {"annotation": 2, "operator": 1}
    assert found.steps == {
        3: (ORIGIN_US, ORIGIN_US + STEP_US),
        4: (ORIGIN_US + STEP_US, ORIGIN_US + 2 * STEP_US),
    }
    assert (found.begin_us, found.end_us) == (ORIGIN_US, ORIGIN_US + 2 * STEP_US)


@pytest.mark.skipif(not FOLDER.is_dir(), reason="the evaluation traces are not here")
@pytest.mark.parametrize(
    ("name", "sees_gpu"),
    [("resnet50_workers4.json.gz", True), ("amd_mi250.json.gz", True), ("cpu_only.json.gz", False)],
)
def test_the_counts_of_real_traces_agree_with_what_diagnosis_reads(
    name: str, sees_gpu: bool
) -> None:
    found, trace = take_inventory(FOLDER / name), read_trace(FOLDER / name)
    events = trace.events
    assert found.counts["kernel"] == len(events["kernel"])
    # Old traces file annotations under operators, which the diagnosis separates by name.
    operators = found.counts["operator"] + found.counts["annotation"]
    assert operators == len(events["operator"]) + len(events["annotation"])
    annotated = [e for e in events["annotation"] if e.name.startswith("ProfilerStep#")]
    assert set(found.steps) == {int(step.name.partition("#")[2]) for step in annotated}
    assert found.begin_us == min(e.begin_us for kept in events.values() for e in kept)
    assert found.end_us == max(e.end_us for kept in events.values() for e in kept)
    assert found.sees_gpu is sees_gpu
    assert (found.untimed, found.listed > operators) == (0, True)
