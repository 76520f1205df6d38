"""Idle time is split into causes that add up to it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cases import cases
from tests.diagnosis.timeline import MAIN, Timeline, assert_split
from tests.diagnosis.traces import LOADER
from warpwatch_diagnosis.measures.host_events import CAUSES
from warpwatch_diagnosis.trace.events import Kind

CASES = cases(__file__)

# Kind, name, start and duration in µs, thread.
Added = tuple[Kind, str, float, float, str] | tuple[Kind, str, float, float]


def causes(timeline: Timeline) -> dict[str, float]:
    gpu = timeline.gpu()
    assert_split(gpu)
    return {cause: round(us, 3) for cause in CAUSES if (us := gpu.idle_time.total_us(cause))}


def one_gap(*added: Added) -> Timeline:
    """The device works for 6 ms, then is idle for 3.01 ms, until a kernel launched late."""
    timeline = Timeline()
    timeline.kernel(0, 6_000, launched_us=-100)
    timeline.kernel(9_010, 990, launched_us=9_000)
    for one in added:
        timeline.add(*one)
    return timeline


@pytest.mark.parametrize(("added", "expected"), CASES["gaps"].values(), ids=CASES["gaps"])
def test_a_gap_is_put_to_what_the_host_does(added, expected):
    assert causes(one_gap(*added)) == expected


@pytest.mark.parametrize("cause", CASES["named"])
def test_what_has_a_name_in_the_trace_takes_its_part_of_the_gap(cause):
    for kind, name in CASES["named"][cause]:
        found = causes(one_gap((kind, name, 6_500, 2_000)))
        assert found == {cause: 2_000, "host": 1_000, "launch": 10}, name


@pytest.mark.parametrize("case", CASES["timelines"].values(), ids=CASES["timelines"])
def test_each_part_of_an_idle_device_has_its_cause(case):
    timeline = Timeline(step_us=case.get("step_us", 10_000))
    for call in case.get("calls", ()):
        timeline.add(*call)
    for at_us, us, launched_us in case["kernels"]:
        timeline.kernel(at_us, us, launched_us)
    assert causes(timeline) == case["causes"]


SPANS = st.lists(st.tuples(st.integers(0, 900), st.integers(0, 200)), max_size=8)


@given(SPANS, st.tuples(SPANS, SPANS, SPANS, SPANS))
def test_causes_are_disjoint_and_add_up_to_the_idle_time(kernels, host):
    timeline = Timeline(step_us=1_000)
    timeline.kernel(1_200, 1, launched_us=300)
    for at, us in kernels:
        timeline.kernel(at, us, launched_us=at - us)
    kinds: tuple[tuple[Kind, str], ...] = (
        ("runtime", "cudaStreamSynchronize"), ("runtime", "cudaMalloc"),
        ("operator", "aten::mm"), ("annotation", LOADER),
    )  # fmt: skip
    for (kind, name), spans in zip(kinds, host, strict=True):
        for at, us in spans:
            timeline.add(kind, name, at, us, MAIN)
    gpu = timeline.measured().gpu
    if gpu is not None:
        assert_split(gpu)
