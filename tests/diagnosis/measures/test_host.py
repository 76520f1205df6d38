"""The host's activities beside operators, by the names of real traces, and its waits."""

import sys
from collections.abc import Callable
from typing import Any

import pytest

from tests.cases import cases
from tests.diagnosis.timeline import Timeline
from warpwatch_diagnosis.measures.host_events import HostTime
from warpwatch_diagnosis.trace.events import Kind

CASES = cases(__file__)


def host(*added: tuple[Kind, str, float, float]) -> HostTime:
    timeline = Timeline()
    timeline.add("operator", "aten::mm", 0, 10)
    for one in added:
        timeline.add(*one)
    return timeline.measured().host


@pytest.mark.parametrize(("names", "saved_us"), [(CASES["saving"], 500), (CASES["not_saving"], 0)])
def test_a_checkpoint_is_a_name_that_saves(names, saved_us):
    for kind, kept in names.items():
        for name in kept:
            assert host((kind, name, 1_000, 500)).checkpoint.total_us == saved_us, name


def frames_around_reads(count: int) -> Timeline:
    timeline = Timeline()
    for n in range(count):
        timeline.add("operator", "aten::nonzero", n / 2, 0.25)
        timeline.add("python", f"train.py({n}): step", 0, 9_000)
    return timeline


def steps_over_each_other(count: int) -> Timeline:
    timeline = Timeline(steps=0)
    for n in range(count):
        timeline.add("annotation", f"ProfilerStep#{n}", 0, 3_000)
        timeline.kernel(n / 2, 0.25, None)
    return timeline


@pytest.mark.parametrize("events", [frames_around_reads, steps_over_each_other])
def test_twice_the_events_cost_twice_the_work(events):
    """A trace of 100 kB that is packed well could keep its reader busy for minutes otherwise."""
    once, twice = (lines_run(events(count).measured) for count in (300, 600))
    assert twice < 2.5 * once


def lines_run(function: Callable[[], object]) -> int:
    """Count the lines of Python that a call runs, iterations of a loop in one line included."""
    lines = 0

    def trace(frame: Any, event: str, argument: Any) -> Any:
        nonlocal lines
        lines += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(before)
    return lines
