"""Invariants of the numbers of real and simulated traces, shuffled and stretched."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.diagnosis.conftest import Simulations
from tests.diagnosis.timeline import assert_split
from tests.diagnosis.trace.odd_traces import ratios
from warpwatch_diagnosis.measures.host_events import CAUSES
from warpwatch_diagnosis.measures.measures import Measures, measure, trace_json
from warpwatch_diagnosis.trace.events import TraceEvent
from warpwatch_diagnosis.trace.reader import Trace, read_trace

EVALUATION = Path(__file__).parents[3] / "shared" / "evaluation" / "traces"
FIXTURES = Path(__file__).parent / "fixtures"
# Some are enough: faults do not change what holds.
RECORDED = [
    FIXTURES / "plain" / "graph_breaks-perceptron.pt.trace.json.gz",
    FIXTURES / "stacks" / "item-convolutional.pt.trace.json.gz",
    *(path for name in ("alexnet_v100", "amd_mi250", "nccl_a100", "resnet50_workers4")
      if (path := EVALUATION / f"{name}.json.gz").exists()),
]  # fmt: skip
# With GPUs, for each another cause of idle time, and one with ranks that wait for each other.
SIMULATED = (
    "healthy", "launch_bound", "sync_bound", "transfer_bound", "communication_bound", "gc_pause",
    "straggler_host",
)  # fmt: skip
# Where a limit in µs separates two causes, stretched time moves from one to the other.
FEEDING = ("launch", "dispatch", "host", "synchronization", "communication", "copy")
QUEUED = ("kernel_gap", "unexplained")


class Known(NamedTuple):
    trace: Trace
    measures: Measures
    document: dict[str, Any]


@pytest.fixture(
    scope="module",
    params=[*RECORDED, *SIMULATED],
    ids=lambda param: param.name.partition(".")[0] if isinstance(param, Path) else param,
)
def known(request: pytest.FixtureRequest, simulations: Simulations) -> Known:
    name = request.param
    path = name if isinstance(name, Path) else simulations.paths(name)[-1]
    trace = read_trace(path)
    measures = measure(trace)
    return Known(trace, measures, trace_json(measures))


def rebuilt(trace: Trace, change: Callable[[list[TraceEvent]], list[TraceEvent]]) -> dict[str, Any]:
    """The numbers of the trace with its events changed."""
    other = Trace(trace.file, trace.rank, device_name=trace.device_name)
    for kind, events in trace.events.items():
        other.events[kind] = change(events)
    return trace_json(measure(other))


def test_ratios_lie_between_0_and_1_and_the_causes_add_up_to_the_idle_time(known: Known) -> None:
    document, gpu = known.document, known.measures.gpu
    assert all(0 <= ratio <= 1 for ratio in ratios(document))
    if gpu is None:
        assert document["idle"] is None
        return
    assert_split(gpu)
    assert sum(document["idle"].values()) == pytest.approx(
        document["time"]["idle_ratio"], abs=len(CAUSES) * 5e-5
    )


def test_the_order_of_events_does_not_matter(known: Known) -> None:
    shuffler = random.Random(7)
    shuffled = rebuilt(known.trace, lambda events: shuffler.sample(events, len(events)))
    assert shuffled == known.document


def test_shares_do_not_change_when_time_is_stretched(known: Known) -> None:
    before = known.document
    # From the first event on: far from 0, a float's steps are a quarter of a µs.
    origin_us = min(e.begin_us for events in known.trace.events.values() for e in events)
    after = rebuilt(
        known.trace,
        lambda events: [
            e._replace(begin_us=3 * (e.begin_us - origin_us), end_us=3 * (e.end_us - origin_us))
            for e in events
        ],
    )
    assert after["time"] == before["time"]
    if before["idle"] is None:
        return
    for cause in before["idle"].keys() - {*FEEDING, *QUEUED}:
        assert after["idle"][cause] == pytest.approx(before["idle"][cause], abs=1e-3)
    for group in (FEEDING, QUEUED):
        wanted = sum(before["idle"][cause] for cause in group)
        assert sum(after["idle"][cause] for cause in group) == pytest.approx(wanted, abs=2e-3)
