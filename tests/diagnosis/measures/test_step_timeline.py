"""The longest step as lanes that a report can draw."""

from __future__ import annotations

from tests.diagnosis.timeline import Timeline
from tests.diagnosis.traces import LOADER
from warpwatch_diagnosis.measures.measures import measure
from warpwatch_diagnosis.measures.step_timeline import RESOLUTION, Lane, StepTimeline


def drawn(timeline: Timeline) -> StepTimeline:
    found = measure(timeline.trace).timeline
    assert found is not None
    return found


def spans(lane: Lane) -> list[tuple[float, float, str]]:
    return [(s.begin_us, s.end_us, s.label) for s in lane.spans]


def test_the_longest_step_has_lanes_for_the_host_each_stream_and_the_idle_time() -> None:
    timeline = Timeline(steps=1)
    timeline.add("annotation", "ProfilerStep#7", 10_000, 20_000)
    timeline.add("annotation", LOADER, 10_000, 5_000)
    timeline.add("operator", "aten::mm", 15_000, 100)
    timeline.kernel(15_100, 4_900, launched_us=15_050, name="ampere_sgemm_128x64_nn")
    timeline.copy(20_000, 10_000, 15_090, "Memcpy HtoD (Pinned -> Device)")
    found = drawn(timeline)
    assert (found.number, found.duration_us) == (7, 20_000)
    assert [(lane.name, lane.kind) for lane in found.lanes] == [
        ("host", "host"),
        ("0/7", "stream"),
        ("idle", "idle"),
    ]
    host, stream, idle = found.lanes
    assert spans(host) == [(0, 5_000, "data_loading"), (5_000, 5_100, "operator")]
    assert spans(stream) == [(5_100, 10_000, "gemm"), (10_000, 20_000, "HtoD")]
    assert stream.spans[0].name == "ampere_sgemm_128x64_nn"
    assert spans(idle) == [
        (0, 5_000, "data_loading"),
        (5_000, 5_050, "dispatch"),
        (5_050, 5_100, "launch"),
    ]


def test_thousands_of_short_kernels_become_few_spans_of_the_longest() -> None:
    timeline = Timeline(step_us=100_000)
    for index in range(20_000):
        name = "ampere_sgemm_128x64_nn" if index % 2 else "vectorized_elementwise_kernel"
        timeline.kernel(5 * index, 1 + index % 2, launched_us=None, name=name)
    stream = drawn(timeline).lanes[1]
    assert len(stream.spans) <= RESOLUTION
    assert {span.label for span in stream.spans} == {"gemm"}


def test_without_steps_there_is_nothing_to_draw() -> None:
    timeline = Timeline(steps=0)
    timeline.kernel(0, 100, launched_us=-10)
    assert measure(timeline.trace).timeline is None
