"""Operators: self time, the device's time, FLOPs from recorded shapes, lines of code."""

import pytest

from tests.diagnosis.timeline import Timeline
from warpwatch_diagnosis.measures.flops import convolution, shapes_of, work_of
from warpwatch_diagnosis.measures.operators import Operators

SHAPES = {"Input Dims": [[16, 64], [64, 8]], "Input type": ["float", "float"]}


def operators(timeline: Timeline) -> Operators:
    return timeline.measured().operators


def test_self_time_is_without_the_operators_inside():
    timeline = Timeline()
    timeline.add("operator", "aten::linear", 100, 100)
    timeline.add("operator", "aten::t", 110, 10)
    timeline.add("operator", "aten::addmm", 130, 60)
    timeline.add("operator", "aten::expand", 140, 20)
    found = operators(timeline)
    assert {t.name: (t.total_us, t.self_us) for t in found.by_self_time} == {
        "aten::linear": (100, 30),
        "aten::t": (10, 10),
        "aten::addmm": (60, 40),
        "aten::expand": (20, 20),
    }


def test_gpu_time_belongs_to_the_operator_that_launched():
    timeline = Timeline()
    timeline.add("operator", "aten::linear", 100, 100)
    timeline.add("operator", "aten::addmm", 130, 60)
    timeline.kernel(300, 500, launched_us=140)
    timeline.kernel(800, 70, launched_us=195)
    timeline.kernel(900, 11, launched_us=5_000)
    found = operators(timeline)
    assert [(t.name, t.gpu_us) for t in found.by_gpu_time] == [
        ("aten::addmm", 500),
        ("aten::linear", 70),
    ]


def test_calls_are_grouped_by_their_shapes():
    timeline = Timeline()
    timeline.add("operator", "aten::mm", 0, 10, arguments=SHAPES)
    timeline.add("operator", "aten::mm", 20, 10, arguments=SHAPES)
    timeline.add("operator", "aten::mm", 40, 30, arguments={"Input Dims": [[2, 3], [3, 4], []]})
    times = operators(timeline).by_self_time
    assert [(t.shapes, t.count) for t in times] == [("[2, 3] [3, 4]", 1), ("[16, 64] [64, 8]", 2)]


def test_flops_count_once_however_operators_nest():
    timeline = Timeline(device="NVIDIA A100-SXM4-80GB")
    linear = {"Input Dims": [[16, 64], [8, 64], [8]], "Input type": ["float"] * 3}
    addmm = {"Input Dims": [[8], [16, 64], [64, 8]], "Input type": ["float"] * 3}
    timeline.add("operator", "aten::linear", 0, 100, arguments=linear)
    timeline.add("operator", "aten::addmm", 10, 80, arguments=addmm)
    timeline.kernel(200, 100, launched_us=20)
    timeline.add("operator", "aten::linear", 200, 100, arguments=linear)
    found = operators(timeline)
    flops = {time.name: time.flops for time in found.by_self_time}
    assert flops["aten::addmm"] == 2 * 16 * 64 * 8
    assert found.work["gemm"].flops == 2 * 2 * 16 * 64 * 8
    assert (found.work["gemm"].gpu_us, found.work["gemm"].dtype) == (100, "float32")


@pytest.mark.parametrize(
    ("given", "weight", "output", "forward"),
    [
        ([32, 3, 224, 224], [64, 3, 7, 7], [32, 64, 112, 112], 2 * 32 * 64 * 112**2 * 3 * 7 * 7),
        # Transposed: the weight is (input channels, output channels, ...).
        ([2, 16, 8, 8], [16, 3, 2, 2], [2, 3, 16, 16], 2 * (2 * 16 * 8 * 8) * 3 * 2 * 2),
    ],
    ids=["plain", "transposed"],
)
def test_a_forward_convolution_is_known_by_its_backward_call(given, weight, output, forward):
    timeline = Timeline()
    shapes = {"Input Dims": [given, weight, []]}
    timeline.add("operator", "aten::convolution", 0, 10, arguments=shapes)
    assert operators(timeline).work == {}
    shapes = {"Input Dims": [output, given, weight]}
    timeline.add("operator", "aten::convolution_backward", 20, 10, arguments=shapes)
    assert operators(timeline).work["convolution"].flops == 3 * forward


HEADS = ((1, 2, 128, 64),) * 4
ATTENTION = "aten::_scaled_dot_product_flash_attention"


@pytest.mark.parametrize(
    ("name", "shapes", "flops", "elements"),
    [
        ("aten::mm", ((16, 64), (64, 8)), 16_384, 1024 + 512 + 128),
        ("aten::addmm", ((8,), (16, 64), (64, 8)), 16_384, 8 + 1024 + 512 + 128),
        ("aten::bmm", ((4, 16, 64), (4, 64, 8)), 65_536, 4 * (1024 + 512 + 128)),
        ("aten::baddbmm", ((4, 16, 8), (4, 16, 64), (4, 64, 8)), 65_536, 4 * 1792),
        ("aten::linear", ((2, 8, 64), (8, 64)), 16_384, 1024 + 512 + 128),
        (ATTENTION, HEADS[:3], 4 * 2 * 128 * 128 * 64, 4 * 2 * 128 * 64),
        (ATTENTION + "_backward", HEADS, 10 * 2 * 128 * 128 * 64, 7 * 2 * 128 * 64),
    ],
)
def test_shapes_give_flops_and_bytes(name, shapes, flops, elements):
    half = work_of(name, shapes, ["c10::Half"] * len(shapes))
    assert (half.flops, half.bytes, half.dtype) == (flops, 2 * elements, "float16")


@pytest.mark.parametrize(
    ("name", "shapes"),
    [
        ("aten::add", ((4,), (4,))),
        ("aten::mm", ((16, 64), (63, 8))),
        ("aten::mm", ((16, 64),)),
        ("aten::mm", ((), ())),
        ("aten::bmm", ((4, 16, 64), (5, 64, 8))),
        ("aten::linear", ((), (8, 64))),
        ("aten::convolution_backward", ((), (), ())),
    ],
)
def test_shapes_that_do_not_fit_have_no_flops(name, shapes):
    assert work_of(name, shapes, []) is None


@pytest.mark.parametrize(
    ("given", "output", "weight", "flops"),
    [
        ((2, 3, 8, 8), (2, 16, 8, 8), (16, 3, 3, 3), 2 * (2 * 16 * 64) * 27),
        ((2, 8, 8, 8), (2, 16, 8, 8), (16, 1, 3, 3), 2 * (2 * 16 * 64) * 9),
        # Transposed, from 8 x 8 to 16 x 16: the weight is (input channels, output channels, ...).
        ((2, 16, 8, 8), (2, 3, 16, 16), (16, 3, 2, 2), 2 * (2 * 16 * 64) * 12),
    ],
    ids=["plain", "groups", "transposed"],
)
def test_a_convolution_counts_by_its_weights_side(given, output, weight, flops):
    assert convolution(given, output, weight) == flops


@pytest.mark.parametrize(
    ("given", "shapes"),
    [
        ([[2, 3], [], [0, 4]], ((2, 3), (), (0, 4))),
        ([[2**50], [10**400], [-1], ["x"], 7], ((), (), (), (), ())),
        ([[0, 2**49, 2**49], [2**25, 2**25]], ((), ())),
        ([[1] * 64, [1] * 65], ((1,) * 64, ())),
        ("[[2, 3]]", ((2, 3),)),
    ],
)
def test_a_shape_beyond_bounds_is_no_shape_at_all(given, shapes):
    assert shapes_of({"Input Dims": given}) == shapes


def test_the_line_of_an_operator_comes_from_its_stack_or_from_the_frames_around_it():
    timeline = Timeline()
    timeline.add("python", "/home/me/train.py(7): step", 0, 5_000)
    timeline.add("python", "/home/me/model.py(30): forward", 10, 900)
    timeline.add("python", "torch/nn/functional.py(5): linear", 20, 800)
    timeline.add("operator", "aten::linear", 30, 700)
    timeline.add("operator", "aten::add", 1_000, 10)
    stack = "lib/site-packages/torch/x.py(1): f;run.py(3): main"
    timeline.add("operator", "aten::mul", 7_000, 500, arguments={"Call stack": stack})
    timeline.add("operator", "aten::relu", 8_000, 500)
    places = {time.name: time.place for time in operators(timeline).by_self_time}
    assert places == {
        "aten::linear": "home/me/model.py(30): forward",
        "aten::add": "home/me/train.py(7): step",
        "aten::mul": "run.py(3): main",
        "aten::relu": None,
    }
