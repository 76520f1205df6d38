"""Operators: self time, the device's time, FLOPs from recorded shapes, lines of code."""

import pytest

from warpwatch_diagnosis.measures.operators import convolution, shapes_of, work_of

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
