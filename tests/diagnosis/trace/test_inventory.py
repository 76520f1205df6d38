"""The inventory counts the events that the diagnosis reads."""

from pathlib import Path

import pytest

from tests.diagnosis.conftest import Simulations
from tests.diagnosis.traces import ORIGIN_US, STEP_US, TraceFile
from warpwatch_diagnosis.trace.reader import read_trace, take_inventory

FIXTURES = Path(__file__).parents[1] / "fixtures"
RECORDED = FIXTURES / "plain" / "healthy-perceptron.pt.trace.json.gz"


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


@pytest.mark.parametrize("on_gpu", [True, False])
def test_counts_are_those_that_diagnosis_reads(simulations: Simulations, on_gpu: bool) -> None:
    path = simulations.paths("transfer_bound")[0] if on_gpu else RECORDED
    found, events = take_inventory(path), read_trace(path).events
    assert found.counts == {kind: len(kept) for kind, kept in events.items() if kept}
    annotated = [e for e in events["annotation"] if e.name.startswith("ProfilerStep#")]
    steps = {int(e.name.partition("#")[2]): (e.begin_us, e.end_us) for e in annotated}
    assert found.steps == steps
    assert found.begin_us == min(e.begin_us for kept in events.values() for e in kept)
    assert found.end_us == max(e.end_us for kept in events.values() for e in kept)
    assert (found.sees_gpu, found.untimed) == (on_gpu, 0)
    assert found.listed == sum(found.counts.values())
