"""The numbers of each step, which add up to those of the window."""

from __future__ import annotations

import pytest

from tests.diagnosis.timeline import Timeline
from tests.diagnosis.traces import LOADER
from warpwatch_diagnosis.measures.measures import measure


def test_each_step_has_its_own_share_of_what_crosses_its_border() -> None:
    timeline = Timeline(steps=2)
    timeline.kernel(9_000, 3_000, launched_us=8_990)
    timeline.kernel(11_000, 2_000, launched_us=8_995, name="ncclDevKernel_AllReduce")
    timeline.copy(15_000, 500, 14_000, "Memcpy HtoD (Pinned -> Device)")
    timeline.add("annotation", LOADER, 0, 4_000)
    first, second = measure(timeline.trace).per_step
    assert (first.number, first.duration_us, first.data_loading_us) == (0, 10_000, 4_000)
    assert (first.gpu_busy_us, second.gpu_busy_us) == (1_000, 3_500)
    assert (first.compute_us, second.compute_us) == (1_000, 2_000)
    assert (second.communication_us, second.exposed_communication_us) == (2_000, 1_000)
    assert (first.memory_copy_us, second.memory_copy_us) == (0, 500)
    assert first.idle_us["data_loading"] == 4_000
    for step in (first, second):
        assert step.gpu_busy_us is not None
        assert sum(step.idle_us.values()) == pytest.approx(step.duration_us - step.gpu_busy_us)


def test_without_a_gpu_a_step_knows_its_data_loading_only() -> None:
    timeline = Timeline(steps=2)
    timeline.add("operator", "aten::mm", 0, 20_000)
    timeline.add("annotation", LOADER, 9_000, 3_000)
    first, second = measure(timeline.trace).per_step
    assert (first.data_loading_us, second.data_loading_us) == (1_000, 2_000)
    assert (first.gpu_busy_us, first.idle_us) == (None, {})
