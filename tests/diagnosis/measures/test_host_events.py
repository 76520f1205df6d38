"""What the host does besides operators, by the names that events have in real traces."""

from __future__ import annotations

import pytest

from tests.diagnosis.timeline import Timeline
from warpwatch_diagnosis.measures.host_events import HostTime
from warpwatch_diagnosis.measures.measures import measure
from warpwatch_diagnosis.measures.measures_json import cpu_ratios


def host(timeline: Timeline) -> HostTime:
    timeline.add("operator", "aten::mm", 0, 10)
    return measure(timeline.trace).host


def test_nested_compilation_events_are_one_compilation() -> None:
    timeline = Timeline()
    for name, at_us, us in (
        ("dynamo", 1_000, 5_000),
        ("_compile.compile_inner (dynamo_timed)", 1_100, 4_000),
        ("OutputGraph.call_user_compiler (dynamo_timed)", 1_200, 3_000),
        ("gc (dynamo_timed)", 1_300, 100),
        ("_compile.compile_inner (dynamo_timed)", 8_000, 500),
    ):
        timeline.add("operator", name, at_us, us)
    found = host(timeline)
    assert (found.compile.count, found.compile.total_us, found.gc.count) == (2, 5_500, 0)
    assert (found.compile.longest_us, found.compile.names[0]) == (5_000, "dynamo")


def test_regions_that_were_compiled_again_are_counted_apart() -> None:
    timeline = Timeline()
    names = ["0/0", "1/0", "0/1", "0/2_1", "0/2"]
    for index, region in enumerate(names):
        timeline.add("operator", f"Torch-Compiled Region: {region}", 100 + 10 * index, 5)
    timeline.add("operator", "Torch-Compiled Region", 500, 5)
    found = host(timeline)
    assert (found.compiled_regions, found.recompiled_regions) == (6, 2)
    assert found.compile.count == 0


@pytest.mark.parametrize(
    "name",
    [
        "/home/me/train.py(8): save_checkpoint",
        "checkpointing.py(12): save",
        "torch/serialization.py(944): save",
        "torch/distributed/checkpoint/state_dict_saver.py(73): save",
        "transformers/modeling_utils.py(2000): save_pretrained",
    ],
)
def test_frames_that_write_a_checkpoint(name: str) -> None:
    timeline = Timeline()
    timeline.add("python", name, 1_000, 500)
    assert host(timeline).checkpoint.total_us == 500


@pytest.mark.parametrize(
    "name",
    [
        "torch/utils/checkpoint.py(200): checkpoint",
        "torch/serialization.py(1000): load",
        "CheckpointFunctionBackward",
        "model.py(3): load_checkpoint",
    ],
)
def test_activation_checkpointing_and_loading_are_no_checkpoint(name: str) -> None:
    timeline = Timeline()
    timeline.add("python", name, 1_000, 500)
    timeline.add("operator", "CheckpointFunction", 1_000, 500)
    timeline.add("annotation", "activation_checkpoint", 1_000, 500)
    assert host(timeline).checkpoint.count == 0


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("checkpoint", 1),
        ("save_checkpoint", 1),
        ("Writing checkpoint 12", 1),
        ("torch.save", 1),
        ("upload_ckpt", 1),
        ("gradient_checkpointing", 0),
        ("checkpoint_wrapper.forward", 0),
        ("selective_activation_checkpoint", 0),
        ("load_checkpoint", 0),
        ("restore_checkpoint", 0),
        ("checkpointed_layer_3", 0),
    ],
)
def test_an_annotation_is_a_checkpoint_if_it_says_that_something_is_saved(
    name: str, count: int
) -> None:
    timeline = Timeline()
    timeline.add("annotation", name, 1_000, 500)
    assert host(timeline).checkpoint.count == count


def test_enqueueing_a_collective_is_no_waiting_but_blocking_in_it_is() -> None:
    timeline = Timeline()
    timeline.add("operator", "c10d::allreduce_", 100, 90)
    timeline.add("operator", "c10d::barrier", 1_000, 2_000)
    found = host(timeline)
    assert (found.collectives.count, found.collectives.total_us) == (1, 2_000)


@pytest.mark.parametrize("name", ["cudaMallocAsync", "cudaFreeAsync", "cudaMemcpyAsync"])
def test_calls_that_do_not_go_to_the_driver_for_memory_are_no_allocation(name: str) -> None:
    timeline = Timeline()
    timeline.add("runtime", name, 100, 90)
    assert host(timeline).allocator.count == 0


def test_a_cpu_only_trace_has_the_same_parts_disjoint() -> None:
    timeline = Timeline()
    timeline.add("operator", "_compile.compile_inner (dynamo_timed)", 0, 2_000)
    timeline.add("operator", "aten::empty", 500, 100)
    timeline.add("python", "Python GC", 3_000, 1_000)
    timeline.add("annotation", "torch.save", 5_000, 2_000)
    timeline.add("operator", "aten::mm", 8_000, 1_000)
    cpu = cpu_ratios(measure(timeline.trace))
    assert cpu == {
        "operator_ratio": 0.1,
        "dispatch_ratio": 0.0,
        "collective_wait_ratio": 0.0,
        "host_ratio": 0.4,
        "compile_ratio": 0.2,
        "gc_ratio": 0.1,
        "checkpoint_ratio": 0.2,
    }
