"""A process that drives several devices is judged by the one that idles most."""

from __future__ import annotations

from tests.diagnosis.timeline import Timeline
from warpwatch_diagnosis.measures.gpu_time import GpuTime
from warpwatch_diagnosis.measures.intervals import total
from warpwatch_diagnosis.measures.measures import measure
from warpwatch_diagnosis.measures.measures_json import trace_json
from warpwatch_diagnosis.verdict.conclusion import conclude

GEMM = {"Input Dims": [[8192, 4096], [4096, 4096]], "Input type": ["c10::BFloat16"] * 2}


def gpu_of(timeline: Timeline) -> GpuTime:
    found = measure(timeline.trace).gpu
    assert found is not None
    return found


def two_devices() -> Timeline:
    """Device 0 is busy for 98 % of each step, device 1 for 9 %."""
    timeline = Timeline(steps=4, device="NVIDIA H100 80GB HBM3")
    for begin in range(0, 40_000, 10_000):
        timeline.kernel(begin + 100, 9_800, launched_us=begin + 10, stream="0/7")
        timeline.kernel(begin + 9_100, 900, launched_us=begin + 9_050, stream="1/7")
    return timeline


def test_an_idle_device_does_not_hide_behind_a_busy_one() -> None:
    measures = measure(two_devices().trace)
    document = trace_json(measures)
    assert document["time"]["gpu_busy_ratio"] == 0.09
    assert sum(document["idle"].values()) == 0.91
    assert document["device"] == "1"
    assert [(d["name"], d["busy_ratio"], d["in_use"]) for d in document["devices"]] == [
        ("0", 0.98, True),
        ("1", 0.09, True),
    ]
    assert [s["name"] for s in document["streams"]] == ["1/7"]
    assert measures.label == "t.json, GPU 1"
    assert conclude([measures]).verdict != "healthy"


def test_what_a_stray_context_leaves_on_a_device_is_not_judged() -> None:
    timeline = Timeline()
    timeline.kernel(0, 9_900, launched_us=-10, stream="3/7")
    timeline.kernel(100, 2, launched_us=-10, stream="0/7")
    gpu = gpu_of(timeline)
    assert (gpu.device, gpu.devices_in_use, total(gpu.busy)) == ("3", 1, 9_900)
    assert measure(timeline.trace).label == "t.json"


def test_compute_of_another_device_hides_no_communication() -> None:
    timeline = Timeline()
    timeline.kernel(0, 9_000, launched_us=-10, stream="0/7")
    timeline.kernel(1_000, 5_000, launched_us=-10, name="ncclDevKernel_AllReduce", stream="1/20")
    gpu = gpu_of(timeline)
    assert (total(gpu.exposed_communication), gpu.overlap_ratio) == (5_000, 0.0)


def test_mfu_is_that_of_all_devices_in_use() -> None:
    timeline = two_devices()
    timeline.add("operator", "aten::mm", 0, 100, arguments=GEMM)
    alone = Timeline(steps=4, device="NVIDIA H100 80GB HBM3")
    alone.kernel(100, 9_800, launched_us=10)
    alone.add("operator", "aten::mm", 0, 100, arguments=GEMM)
    both, one = measure(timeline.trace).roofline, measure(alone.trace).roofline
    assert both is not None and one is not None
    assert both.mfu_ratio is not None and one.mfu_ratio is not None
    assert both.flops == one.flops
    assert both.mfu_ratio * 2 == one.mfu_ratio


def test_the_argument_names_the_device_before_the_process_id_does() -> None:
    timeline = Timeline()
    timeline.kernel(0, 100, launched_us=-10, stream="5/7", arguments={"device": 0})
    timeline.kernel(200, 100, launched_us=-10, stream="6/7", arguments={"device": 0})
    assert [(d.name, d.count) for d in gpu_of(timeline).devices] == [("0", 2)]
